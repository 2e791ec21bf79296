// What bench/queue_client.py does, with Apache's own classic client: reads orders as lines of JSON, answers each with one.

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

class QueueClient {
    private static String names;

    private static void tell(Map<String, ?> what) {
        System.out.println(JSON.toJSONString(what));
        System.out.flush();
    }

    private static <T extends ClientConfig> T here(T client) {
        client.setNamesrvAddr(names);
        client.setClientIP("127.0.0.1");
        client.setInstanceName("bench-" + System.nanoTime());
        return client;
    }

    private static double quantile(List<Double> sorted, double q) {
        return sorted.get(Math.min(sorted.size() - 1, (int) (sorted.size() * q)));
    }

    private static Map<String, Double> spread(List<Double> values, double perSecond) {
        Collections.sort(values);
        return Map.of("p50_ms", quantile(values, 0.5), "p99_ms", quantile(values, 0.99), "per_s", perSecond);
    }

    private static Map<String, Double> send(JSONObject order) throws Exception {
        DefaultMQProducer producer = here(new DefaultMQProducer("bench-senders"));
        producer.start();
        byte[] body = new byte[order.getIntValue("body_bytes")];
        new Random().nextBytes(body);
        long begin = System.nanoTime() + (long) (order.getDoubleValue("warm_up_s") * 1e9);
        long end = begin + (long) (order.getDoubleValue("seconds") * 1e9);
        List<Double> took = Collections.synchronizedList(new ArrayList<>());
        List<Thread> senders = new ArrayList<>();
        for (int number = 0; number < order.getIntValue("in_flight"); number++) {
            Thread sender = new Thread(() -> {
                try {
                    for (long at = System.nanoTime(); at < end; at = System.nanoTime()) {
                        producer.send(new Message(order.getString("topic"), body));
                        if (at >= begin) {
                            took.add((System.nanoTime() - at) / 1e6);
                        }
                    }
                } catch (Exception error) {
                    error.printStackTrace();
                    System.exit(1);
                }
            });
            sender.start();
            senders.add(sender);
        }
        for (Thread each : senders) {
            each.join();
        }
        producer.shutdown();
        return spread(took, took.size() / order.getDoubleValue("seconds"));
    }

    private static Map<String, Double> consume(JSONObject order) throws Exception {
        int count = order.getIntValue("count");
        String topic = order.getString("topic");
        DefaultMQPushConsumer consumer = here(new DefaultMQPushConsumer(order.getString("group")));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        CountDownLatch owned = new CountDownLatch(1);
        CountDownLatch done = new CountDownLatch(1);
        List<Double> late = new ArrayList<>();
        long[] first = new long[1];
        long[] last = new long[1];
        consumer.setMessageQueueListener((changed, all, share) -> {
            if (changed.equals(topic) && share.size() == order.getIntValue("queues")) {
                owned.countDown();
            }
        });
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            synchronized (late) {
                for (MessageExt each : messages) {
                    late.add((double) (System.currentTimeMillis() - each.getStoreTimestamp()));
                    last[0] = System.nanoTime();
                    first[0] = late.size() == 1 ? last[0] : first[0];
                }
                if (late.size() == count) {
                    done.countDown();
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        owned.await();
        tell(Map.of("ready", true));
        done.await();
        consumer.shutdown();
        return spread(late, (count - 1) / ((last[0] - first[0]) / 1e9));
    }

    public static void main(String[] arguments) throws Exception {
        names = arguments[0];
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            JSONObject order = JSON.parseObject(line);
            tell(order.getString("do").equals("send") ? send(order) : consume(order));
        }
        System.exit(0);
    }
}
