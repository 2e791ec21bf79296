// What RocketMQ's own classic client decides: reads questions as JSON from stdin, writes the answers to stdout.

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMachineRoomNearby;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByConfig;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByMachineRoom;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.client.latency.MQFaultStrategy;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.compression.Compressor;
import org.apache.rocketmq.common.compression.CompressorFactory;
import org.apache.rocketmq.common.message.MessageQueue;

class Decisions {
    private static class Rooms implements AllocateMachineRoomNearby.MachineRoomResolver {
        public String brokerDeployIn(MessageQueue queue) {
            return queue.getBrokerName().split("@")[0];
        }

        public String consumerDeployIn(String clientId) {
            return clientId.split("@")[0];
        }
    }

    static AllocateMessageQueueStrategy strategy(String name, JSONObject question) {
        switch (name) {
            case "AVG":
                return new AllocateMessageQueueAveragely();
            case "AVG_BY_CIRCLE":
                return new AllocateMessageQueueAveragelyByCircle();
            case "CONSISTENT_HASH":
                return new AllocateMessageQueueConsistentHash();
            case "MACHINE_ROOM":
                AllocateMessageQueueByMachineRoom byRoom = new AllocateMessageQueueByMachineRoom();
                byRoom.setConsumeridcs(new HashSet<>(question.getList("rooms", String.class)));
                return byRoom;
            case "CONFIG":
                AllocateMessageQueueByConfig byConfig = new AllocateMessageQueueByConfig();
                byConfig.setMessageQueueList(queues(question.getJSONArray("configured")));
                return byConfig;
            default:
                String inner = name.substring("MACHINE_ROOM_NEARBY-".length());
                return new AllocateMachineRoomNearby(strategy(inner, question), new Rooms());
        }
    }

    private static List<MessageQueue> queues(JSONArray rows) {
        List<MessageQueue> queues = new ArrayList<>();
        for (int at = 0; at < rows.size(); at++) {
            JSONArray row = rows.getJSONArray(at);
            queues.add(new MessageQueue(row.getString(0), row.getString(1), row.getIntValue(2)));
        }
        return queues;
    }

    private static List<Object> row(MessageQueue queue) {
        return List.of(queue.getTopic(), queue.getBrokerName(), queue.getQueueId());
    }

    private static Object answer(JSONObject question) throws Exception {
        if (question.containsKey("packed")) {
            Compressor compressor = CompressorFactory.getCompressor(CompressionType.of(question.getString("method")));
            byte[] body = compressor.decompress(Base64.getDecoder().decode(question.getString("packed")));
            return Base64.getEncoder().encodeToString(body);
        }
        List<MessageQueue> queues = queues(question.getJSONArray("queues"));
        if (question.containsKey("key")) {
            return row(new SelectMessageQueueByHash().select(queues, null, question.getString("key")));
        }
        AllocateMessageQueueStrategy strategy = strategy(question.getString("strategy"), question);
        List<Object> share = new ArrayList<>();
        for (MessageQueue queue : strategy.allocate(
                "group", question.getString("client"), queues, question.getList("clients", String.class))) {
            share.add(row(queue));
        }
        return Map.of("name", strategy.getName(), "share", share);
    }

    public static void main(String[] arguments) throws Exception {
        JSONArray questions = JSON.parseArray(new String(System.in.readAllBytes(), "UTF-8"));
        List<Object> answers = new ArrayList<>();
        for (int at = 0; at < questions.size(); at++) {
            answers.add(answer(questions.getJSONObject(at)));
        }
        MQFaultStrategy faults = new MQFaultStrategy(new org.apache.rocketmq.client.ClientConfig(), null, null);
        System.out.println(JSON.toJSONString(Map.of(
                "answers", answers,
                "latencies", faults.getLatencyMax(),
                "pauses", faults.getNotAvailableDuration())));
    }
}
