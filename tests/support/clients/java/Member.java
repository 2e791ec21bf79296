// A member of consumer groups with RocketMQ's own classic client. Does what each line of JSON on stdin says: "join" a
// group, or "leave" it. Tells in lines of JSON which queues of a topic are its own, whenever they change, and what it got.

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

class Member {
    private static final Map<String, DefaultMQPushConsumer> members = new HashMap<>();

    private static synchronized void tell(Map<String, ?> what) {
        System.out.println(JSON.toJSONString(what));
        System.out.flush();
    }

    private static List<List<Object>> owned(DefaultMQPushConsumer consumer, String topic) {
        List<List<Object>> rows = new ArrayList<>();
        for (MessageQueue each :
                consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet()) {
            if (each.getTopic().equals(topic)) {
                rows.add(List.of(each.getTopic(), each.getBrokerName(), each.getQueueId()));
            }
        }
        return rows;
    }

    private static DefaultMQPushConsumer join(JSONObject order, String names) throws Exception {
        String group = order.getString("group");
        String topic = order.getString("topic");
        DefaultMQPushConsumer made = new DefaultMQPushConsumer(group);
        made.setNamesrvAddr(names);
        made.setClientIP(order.getString("room")); // the id is this, an @ and the name of the instance
        made.setInstanceName(group);
        made.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        made.setPersistConsumerOffsetInterval(200);
        made.setPollNameServerInterval(1000); // what went wrong at the start is tried again every 30 s otherwise
        made.setHeartbeatBrokerInterval(1000);
        made.setConsumeThreadMin(2);
        made.setConsumeThreadMax(2);
        made.setAllocateMessageQueueStrategy(Decisions.strategy(order.getString("strategy"), order));
        made.subscribe(topic, "*");
        made.setMessageQueueListener((changed, all, share) -> { // configured ones are taken up with any topic
            tell(Map.of("group", group, "queues", owned(made, topic)));
        });
        made.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt each : messages) {
                List<Object> queue = List.of(topic, each.getBrokerName(), each.getQueueId());
                tell(Map.of("group", group, "got", new String(each.getBody()), "queue", queue));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        made.start();
        return made;
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            JSONObject order = JSON.parseObject(line);
            String group = order.getString("group");
            if (order.getString("do").equals("join")) {
                members.put(group, join(order, arguments[0]));
            } else {
                members.remove(group).shutdown();
                tell(Map.of("group", group, "queues", List.of()));
            }
        }
        System.exit(0);
    }
}
