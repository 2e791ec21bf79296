// The official Java client in a process of its own, told what to do by JSON lines; see tests/support/clients/official/client.py.

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.annotations.SerializedName;
import java.io.BufferedReader;
import java.io.Closeable;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.locks.LockSupport;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.ProducerBuilder;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.client.java.message.MessageViewImpl;

public class Client {
    /** The union of what all commands take, with what it is when it is not given. */
    static class Request {
        int id;
        String name;
        String kind;
        String address;
        String topic;
        String group;
        String tags = "*";
        String sql = "";
        int wait_s = 20;
        String access_key = "";
        String secret_key = "";
        String body = "body";
        int body_bytes;
        String tag = "";
        String key = "";
        Map<String, String> properties = Map.of();
        String message_group = "";
        long deliver_at;
        boolean is_half;
        String handle;
        String message_id;
        int batch = 32;
        int invisible_s = 10;
        int token;
        @SerializedName("do")
        String command;
    }

    static final Gson GSON = new GsonBuilder().serializeNulls().disableHtmlEscaping().create();
    static final PrintStream OUT = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
    static final Pattern FAIL = Pattern.compile("fail (\\d+) .*");
    static final boolean IS_TLS = !"off".equals(System.getenv("CLIENT_TLS"));
    static final Duration REQUEST_MAX = Duration.ofSeconds(10); // by default 3 s, too few where a disk may stall
    static final Map<String, Closeable> clients = new ConcurrentHashMap<>();
    static final Map<Integer, MessageView> messages = new ConcurrentHashMap<>();
    static final Map<String, Transaction> transactions = new ConcurrentHashMap<>(); // by the message id
    static final Set<String> mended = ConcurrentHashMap.newKeySet();
    static final AtomicInteger tokens = new AtomicInteger();
    static ClientServiceProvider rocketmq;

    static void say(Map<String, Object> line) {
        OUT.println(GSON.toJson(line));
    }

    /** Says what a test looks at; `token` names the message in later commands. */
    static Map<String, Object> describe(MessageView message) {
        long atMs = System.currentTimeMillis();
        int token = tokens.incrementAndGet();
        messages.put(token, message);
        Map<String, Object> seen = new HashMap<>();
        seen.put("token", token);
        seen.put("topic", message.getTopic());
        seen.put("message_id", message.getMessageId().toString());
        seen.put("body", StandardCharsets.UTF_8.decode(message.getBody()).toString());
        seen.put("tag", message.getTag().orElse(""));
        seen.put("keys", new TreeSet<>(message.getKeys()));
        seen.put("properties", message.getProperties());
        seen.put("message_group", message.getMessageGroup().orElse(""));
        seen.put("deliver_at_ms", message.getDeliveryTimestamp().orElse(0L));
        seen.put("attempt", message.getDeliveryAttempt());
        seen.put("is_corrupted", ((MessageViewImpl) message).isCorrupted());
        seen.put("at_ms", atMs);
        return seen;
    }

    /** What an error says, and what the errors behind it say: a client that cannot start says why in a cause. */
    static String reasons(Throwable error) {
        String told = String.valueOf(error.getMessage());
        return error.getCause() == null ? told : told + ": " + reasons(error.getCause());
    }

    /** Whether this version of the client has a method of that name. */
    static boolean has(Object of, String name) {
        return Arrays.stream(of.getClass().getMethods()).anyMatch(method -> method.getName().equals(name));
    }

    /** Calls what not every version has: this program is compiled against each of them. */
    static Object call(Object of, String name, Object... arguments) throws ClientException {
        for (Method method : of.getClass().getMethods()) {
            if (method.getName().equals(name) && method.getParameterCount() == arguments.length) {
                try {
                    method.setAccessible(true); // the class may not be public
                    return method.invoke(of, arguments);
                } catch (InvocationTargetException error) {
                    if (error.getCause() instanceof ClientException refused) {
                        throw refused;
                    }
                    throw new IllegalStateException(error.getCause());
                } catch (IllegalAccessException error) {
                    throw new IllegalStateException(error);
                }
            }
        }
        throw new UnsupportedOperationException("this version has no " + name);
    }

    static Map<String, Object> report(String event, String name, MessageView message) {
        Map<String, Object> seen = describe(message);
        seen.put("event", event);
        seen.put("client", name);
        say(seen);
        return seen;
    }

    /**
     * Reports every message; fails those whose body says so, as often as it says (`fail 2 times`), until mended.
     * A body that begins with `hang` keeps it on the first attempt.
     */
    static ConsumeResult consume(String name, MessageView message) {
        String body = (String) report("delivery", name, message).get("body");
        if (body.startsWith("hang ") && message.getDeliveryAttempt() == 1) {
            LockSupport.park();
        }
        Matcher fail = FAIL.matcher(body);
        boolean fails = fail.matches() && message.getDeliveryAttempt() <= Integer.parseInt(fail.group(1));
        return fails && !mended.contains(name) ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
    }

    /** Reports every check and decides by the first word of the body: `commit`, `rollback`, or anything else. */
    static TransactionResolution check(String name, MessageView message) {
        String body = (String) report("check", name, message).get("body");
        return switch (body.split(" ")[0]) {
            case "commit" -> TransactionResolution.COMMIT;
            case "rollback" -> TransactionResolution.ROLLBACK;
            default -> TransactionResolution.UNKNOWN;
        };
    }

    /** Starts a producer, also of transactions, a simple or a push consumer; `sql` takes the place of `tags`. */
    static Closeable start(Request r) throws ClientException {
        ClientConfigurationBuilder configuration = ClientConfiguration.newBuilder()
            .setEndpoints(r.address).setRequestTimeout(REQUEST_MAX);
        if (!r.access_key.isEmpty()) {
            configuration.setCredentialProvider(new StaticSessionCredentialsProvider(r.access_key, r.secret_key));
        }
        if (!IS_TLS) {
            call(configuration, "enableSsl", false); // since 5.0.5
        }
        FilterExpression expression = r.sql.isEmpty()
            ? new FilterExpression(r.tags) : new FilterExpression(r.sql, FilterExpressionType.SQL92);
        Map<String, FilterExpression> subscriptions = Map.of(r.topic, expression);
        switch (r.kind) {
            case "producer", "transactional" -> {
                ProducerBuilder producer = rocketmq.newProducerBuilder()
                    .setClientConfiguration(configuration.build()).setTopics(r.topic);
                if (r.kind.equals("transactional")) {
                    producer.setTransactionChecker(message -> check(r.name, message));
                }
                return producer.build();
            }
            case "simple" -> {
                return rocketmq.newSimpleConsumerBuilder().setClientConfiguration(configuration.build())
                    .setConsumerGroup(r.group).setSubscriptionExpressions(subscriptions)
                    .setAwaitDuration(Duration.ofSeconds(r.wait_s)).build();
            }
            default -> {
                return rocketmq.newPushConsumerBuilder().setClientConfiguration(configuration.build())
                    .setConsumerGroup(r.group).setSubscriptionExpressions(subscriptions)
                    .setMessageListener(message -> consume(r.name, message)).build();
            }
        }
    }

    /** Sends a message; `deliver_at` is in milliseconds. A half message begins a transaction. */
    static Map<String, Object> send(Request r) throws ClientException {
        Producer producer = (Producer) clients.get(r.name);
        byte[] body = r.body_bytes == 0
            ? r.body.getBytes(StandardCharsets.UTF_8) : "x".repeat(r.body_bytes).getBytes(StandardCharsets.UTF_8);
        MessageBuilder message = rocketmq.newMessageBuilder().setTopic(r.topic).setBody(body);
        if (!r.tag.isEmpty()) {
            message.setTag(r.tag);
        }
        if (!r.key.isEmpty()) {
            message.setKeys(r.key);
        }
        r.properties.forEach(message::addProperty);
        if (!r.message_group.isEmpty()) {
            message.setMessageGroup(r.message_group);
        }
        if (r.deliver_at != 0) {
            message.setDeliveryTimestamp(r.deliver_at);
        }
        SendReceipt receipt;
        if (r.is_half) {
            Transaction transaction = producer.beginTransaction();
            receipt = producer.send(message.build(), transaction);
            transactions.put(receipt.getMessageId().toString(), transaction);
        } else {
            receipt = producer.send(message.build());
        }
        Object handle = has(receipt, "getRecallHandle") ? call(receipt, "getRecallHandle") : null;
        return Map.of("message_id", receipt.getMessageId().toString(), "recall_handle", handle == null ? "" : handle);
    }

    static List<Map<String, Object>> receive(Request r) throws ClientException {
        SimpleConsumer consumer = (SimpleConsumer) clients.get(r.name);
        List<Map<String, Object>> found = new ArrayList<>();
        for (MessageView message : consumer.receive(r.batch, Duration.ofSeconds(r.invisible_s))) {
            found.add(describe(message));
        }
        return found;
    }

    static Object run(Request r) throws Exception {
        switch (r.command) {
            case "start" -> clients.put(r.name, start(r));
            case "send" -> {
                return send(r);
            }
            case "recall" -> {
                return call(call(clients.get(r.name), "recallMessage", r.topic, r.handle), "getMessageId").toString();
            }
            case "commit" -> transactions.get(r.message_id).commit();
            case "rollback" -> transactions.get(r.message_id).rollback();
            case "receive" -> {
                return receive(r);
            }
            case "ack" -> ((SimpleConsumer) clients.get(r.name)).ack(messages.get(r.token));
            case "change" -> ((SimpleConsumer) clients.get(r.name))
                .changeInvisibleDuration(messages.get(r.token), Duration.ofSeconds(r.invisible_s));
            case "mend" -> mended.add(r.name); // let the listener of a push consumer fail no more
            case "shutdown" -> clients.remove(r.name).close();
            default -> throw new IllegalArgumentException(r.command);
        }
        return null;
    }

    /** Does one command and says how it went. */
    static void serve(Request r) {
        Map<String, Object> answer = new HashMap<>();
        answer.put("id", r.id);
        try {
            answer.put("ok", run(r));
        } catch (Throwable error) {
            Matcher code = Pattern.compile("response-code=(\\d+)").matcher(String.valueOf(error.getMessage()));
            answer.put("error", reasons(error));
            answer.put("type", error.getClass().getSimpleName());
            answer.put("code", code.find() ? Integer.valueOf(code.group(1)) : null);
        }
        say(answer);
    }

    /** Serves until stdin ends; then it leaves without the client's own shutdown, like a process that is killed. */
    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err); // only protocol lines on stdout; whatever the client prints goes to stderr
        rocketmq = ClientServiceProvider.loadService();
        ExecutorService pool = Executors.newCachedThreadPool();
        say(Map.of("event", "ready"));
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Request request = GSON.fromJson(line, Request.class);
            pool.execute(() -> serve(request));
        }
        Runtime.getRuntime().halt(0);
    }
}
