// What RocketMQ's own classic client puts on the wire: sends, reads, fails and locks once, at the name server it is told.

import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

class Frames {
    private static <T extends ClientConfig> T here(T client, String names) {
        client.setNamesrvAddr(names);
        client.setClientIP("127.0.0.1");
        return client;
    }

    private static DefaultMQPushConsumer consumer(String group, String names, String topic, String filter) throws Exception {
        DefaultMQPushConsumer made = here(new DefaultMQPushConsumer(group), names);
        made.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        made.subscribe(topic, filter);
        return made;
    }

    private static void produce(String names, String topic) throws Exception {
        TransactionMQProducer producer = here(new TransactionMQProducer("frames-producer"), names);
        producer.setTransactionListener(new TransactionListener() {
            public LocalTransactionState executeLocalTransaction(Message half, Object argument) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }

            public LocalTransactionState checkLocalTransaction(MessageExt half) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.start();
        MessageQueue queue = producer.fetchPublishMessageQueues(topic).get(0);
        Message small = new Message(topic, "created", "k1 k2", "small".getBytes());
        small.putUserProperty("colour", "gr\u00fcn");
        producer.send(small, queue);
        for (CompressionType type : CompressionType.values()) {
            producer.setCompressType(type);
            producer.send(new Message(topic, "large", "0123456789".repeat(1000).getBytes()), queue);
        }
        producer.send(List.of(new Message(topic, "b", "one".getBytes()), new Message(topic, "b", "two".getBytes())), queue);
        Message late = new Message(topic, "late", "late".getBytes());
        late.setDelayTimeLevel(1);
        producer.send(late, queue);
        Message timed = new Message(topic, "timed", "timed".getBytes());
        timed.setDeliverTimeMs(System.currentTimeMillis() + 1000);
        producer.send(timed, queue);
        producer.sendOneway(new Message(topic, "once", "once".getBytes()), queue);
        producer.sendMessageInTransaction(new Message(topic, "half", "half".getBytes()), null);
        producer.shutdown();
    }

    public static void main(String[] arguments) throws Exception {
        String names = arguments[0];
        String topic = arguments[1];
        produce(names, topic);
        CountDownLatch done = new CountDownLatch(2);
        DefaultMQPushConsumer failing = consumer("frames-failing", names, topic, "created || b");
        failing.setMaxReconsumeTimes(2);
        failing.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            done.countDown();
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        failing.start();
        DefaultMQPushConsumer orderly = consumer("frames-orderly", names, topic, "*");
        orderly.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            done.countDown();
            return ConsumeOrderlyStatus.SUCCESS;
        });
        orderly.start();
        done.await(60, TimeUnit.SECONDS);
        Thread.sleep(12000);  // offsets are told to the broker after ten seconds
        failing.shutdown();
        orderly.shutdown();
        System.exit(0);
    }
}
