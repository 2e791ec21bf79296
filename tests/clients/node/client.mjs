// The official Node client in a process of its own, told what to do by JSON lines; see tests/support/clients/official/client.py.
import { createInterface } from 'node:readline';
import { createRequire } from 'node:module';
import { writeSync } from 'node:fs';

// The client is CommonJS. Whatever it prints goes to stderr: stdout is for protocol lines only.
console.log = console.info = console.error;
const { ConsumeResult, FilterExpression, Producer, PushConsumer, SimpleConsumer } = createRequire(import.meta.url)(
  'rocketmq-client-nodejs',
);
const SQL = 2; // of the protocol's FilterType, which the client does not export

const clients = new Map();
const messages = new Map();
const transactions = new Map(); // by the message id
const mended = new Set();
let tokens = 0;

function say(line) {
  writeSync(1, JSON.stringify(line) + '\n');
}

// What a test looks at; `token` names the message in later commands.
function describe(message) {
  const token = ++tokens;
  messages.set(token, message);
  return {
    token,
    topic: message.topic,
    message_id: message.messageId,
    body: message.body.toString(),
    tag: message.tag ?? '',
    keys: [...message.keys].sort(),
    properties: Object.fromEntries(message.properties),
    message_group: message.messageGroup ?? '',
    deliver_at_ms: message.deliveryTimestamp?.getTime() ?? 0,
    attempt: message.deliveryAttempt,
    is_corrupted: message.corrupted === true,
    at_ms: Date.now(),
  };
}

// Reports every message; fails those whose body says so, as often as it says (`fail 2 times`), until mended.
// A body that begins with `hang` keeps it on the first attempt.
function listener(name) {
  return {
    async consume(message) {
      const seen = describe(message);
      say({ event: 'delivery', client: name, ...seen });
      const words = seen.body.split(' ');
      if (words[0] === 'hang' && seen.attempt === 1) await new Promise(() => {});
      const fails = words[0] === 'fail' && seen.attempt <= Number(words[1]) && !mended.has(name);
      return fails ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
    },
  };
}

// Reports every check and decides by the first word of the body: `commit` (1), `rollback` (2), or anything else.
function checker(name) {
  return {
    async check(message) {
      const seen = describe(message);
      say({ event: 'check', client: name, ...seen });
      return { commit: 1, rollback: 2 }[seen.body.split(' ')[0]] ?? 0;
    },
  };
}

const commands = {
  async start({ name, kind, address, topic, group, tags = '*', sql = '', wait_s = 20, access_key, secret_key }) {
    const sessionCredentials = access_key && { accessKey: access_key, accessSecret: secret_key };
    const sslEnabled = process.env.CLIENT_TLS === 'on';
    const requestTimeout = 10_000; // by default 3 s, too few where a disk may stall
    const options = { endpoints: address, namespace: '', sessionCredentials, sslEnabled, requestTimeout };
    const subscriptions = new Map([[topic, sql ? new FilterExpression(sql, SQL) : tags]]);
    let client;
    if (kind === 'producer') {
      client = new Producer({ ...options, topics: [topic] });
    } else if (kind === 'transactional') {
      client = new Producer({ ...options, topics: [topic], checker: checker(name) });
    } else if (kind === 'simple') {
      client = new SimpleConsumer({ ...options, consumerGroup: group, subscriptions, awaitDuration: wait_s * 1000 });
    } else {
      client = new PushConsumer({ ...options, consumerGroup: group, subscriptions, messageListener: listener(name) });
    }
    await client.startup();
    clients.set(name, client);
  },
  // `deliver_at` goes to the client as it is (it wants milliseconds, as a Date)
  async send({ name, topic, body = 'body', body_bytes = 0, tag, key, properties, message_group, deliver_at, is_half }) {
    const transaction = is_half ? clients.get(name).beginTransaction() : undefined;
    const receipt = await clients.get(name).send({
      topic,
      body: body_bytes ? Buffer.alloc(body_bytes, 'x') : Buffer.from(body),
      ...(tag && { tag }),
      ...(key && { keys: [key] }),
      ...(properties && { properties: new Map(Object.entries(properties)) }),
      ...(message_group && { messageGroup: message_group }),
      ...(deliver_at && { deliveryTimestamp: new Date(deliver_at) }),
    }, transaction);
    if (is_half) transactions.set(receipt.messageId, transaction);
    return { message_id: receipt.messageId, offset: receipt.offset, recall_handle: receipt.recallHandle ?? '' };
  },
  async recall({ name, topic, handle }) {
    return (await clients.get(name).recallMessage(topic, handle)).messageId;
  },
  async commit({ message_id }) {
    await transactions.get(message_id).commit();
  },
  async rollback({ message_id }) {
    await transactions.get(message_id).rollback();
  },
  async receive({ name, batch = 32, invisible_s = 10 }) {
    return (await clients.get(name).receive(batch, invisible_s * 1000)).map(describe);
  },
  async ack({ name, token }) {
    await clients.get(name).ack(messages.get(token));
  },
  async change({ name, token, invisible_s }) {
    await clients.get(name).changeInvisibleDuration(messages.get(token), invisible_s * 1000);
  },
  // Let the listener of a push consumer fail no more.
  async mend({ name }) {
    mended.add(name);
  },
  async shutdown({ name }) {
    const client = clients.get(name);
    clients.delete(name);
    await client.shutdown();
  },
};

async function serve({ id, do: command, ...request }) {
  try {
    say({ id, ok: (await commands[command](request)) ?? null });
  } catch (error) {
    say({ id, error: String(error?.message ?? error), type: error?.name ?? 'Error', code: error?.code ?? null });
  }
}

// The client rejects promises that nobody waits for while its server is away; an application survives that too.
process.on('unhandledRejection', error => console.error('unhandled rejection', error));
say({ event: 'ready' });
createInterface({ input: process.stdin })
  .on('line', line => void serve(JSON.parse(line)))
  .on('close', () => process.exit(0));
