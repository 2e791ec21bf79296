// The official Rust client in a process of its own, told what to do by JSON lines; see tests/support/clients/official/client.py.
//
// This client has no push consumer, no recall and no change of the invisible duration. It tells protocol codes by their
// names, and ends a transaction once: an application cannot even try to do it again.

use std::collections::HashMap;
use std::future::Future;
use std::io::Write;
use std::pin::Pin;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::error::ClientError;
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{Message, MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{json, Value};
use tokio::io::{AsyncBufReadExt, BufReader};

/// A command; what it does not say has the value that the caller names.
struct Request(Value);

impl Request {
    fn text<'a>(&'a self, name: &str, otherwise: &'a str) -> &'a str {
        self.0[name].as_str().unwrap_or(otherwise)
    }

    fn number(&self, name: &str, otherwise: i64) -> i64 {
        self.0[name].as_i64().unwrap_or(otherwise)
    }

    fn seconds(&self, name: &str, otherwise: i64) -> Duration {
        Duration::from_secs(self.number(name, otherwise) as u64)
    }
}

/// Why a command failed, as the tests are told.
struct Failure {
    text: String,
    kind: String,
    code: Option<String>,
}

impl Failure {
    fn of_ours(text: String) -> Self {
        Failure { text, kind: "Program".to_string(), code: None }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let code = error.context().iter().find(|(name, _)| *name == "code");
        Failure {
            text: error.to_string(),
            kind: format!("{:?}", error.kind()),
            code: code.map(|(_, name)| name.clone()),
        }
    }
}

/// A consumer takes its subscription with every call.
struct Consumer {
    client: SimpleConsumer,
    topic: String,
    expression: FilterExpression,
}

impl Consumer {
    async fn receive(&self, batch: i64, invisible: Duration) -> Result<Vec<Arc<MessageView>>, ClientError> {
        let found = self.client.receive_with(&self.topic, &self.expression, batch as i32, invisible).await?;
        Ok(found.into_iter().map(Arc::new).collect())
    }
}

type Ended = Pin<Box<dyn Future<Output = Result<(), ClientError>> + Send>>;
type End = Box<dyn FnOnce(bool) -> Ended + Send>;

/// Clients live as long as the process: a transaction borrows its producer.
#[derive(Default)]
struct State {
    producers: HashMap<String, &'static Producer>,
    consumers: HashMap<String, &'static Consumer>,
    messages: Vec<Arc<MessageView>>,    // by token - 1
    transactions: HashMap<String, End>, // by the message id
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap()
}

fn producer(r: &Request) -> Result<&'static Producer, Failure> {
    let name = r.text("name", "");
    state().producers.get(name).copied().ok_or_else(|| Failure::of_ours(format!("no producer {name}")))
}

fn consumer(r: &Request) -> Result<&'static Consumer, Failure> {
    let name = r.text("name", "");
    state().consumers.get(name).copied().ok_or_else(|| Failure::of_ours(format!("no consumer {name}")))
}

fn say(line: &Value) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        std::process::exit(0); // nobody listens any more
    }
}

/// Says what a test looks at; `token` names the message in later commands.
fn describe(message: &Arc<MessageView>) -> Value {
    let at_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
    let mut state = state();
    state.messages.push(message.clone());
    json!({
        "token": state.messages.len(),
        "topic": message.topic(),
        "message_id": message.message_id(),
        "body": String::from_utf8_lossy(message.body()),
        "tag": message.tag().unwrap_or(""),
        "keys": message.keys(),
        "properties": message.properties(),
        "message_group": message.message_group().unwrap_or(""),
        "deliver_at_ms": message.delivery_timestamp().unwrap_or(0) * 1000,
        "attempt": message.delivery_attempt(),
        "is_corrupted": false, // it does not look at the digest
        "at_ms": at_ms,
    })
}

fn report(event: &str, name: &str, message: &Arc<MessageView>) {
    let mut seen = describe(message);
    seen["event"] = event.into();
    seen["client"] = name.into();
    say(&seen);
}

/// Reports every check and decides by the first word of the body: `commit`, `rollback`, or anything else.
fn check(name: &str, message: MessageView) -> TransactionResolution {
    let message = Arc::new(message);
    report("check", name, &message);
    match message.body().split(|each| *each == b' ').next() {
        Some(b"commit") => TransactionResolution::COMMIT,
        Some(b"rollback") => TransactionResolution::ROLLBACK,
        _ => TransactionResolution::UNKNOWN,
    }
}

/// Receives, reports and acknowledges for ever: what an application writes that has no push consumer.
async fn listen(name: String, consumer: &'static Consumer, invisible: Duration) {
    loop {
        match consumer.receive(32, invisible).await {
            Ok(found) => {
                for message in found {
                    report("delivery", &name, &message);
                    if let Err(error) = consumer.client.ack(&*message).await {
                        eprintln!("{name}: not acknowledged: {error}");
                    }
                }
            }
            Err(error) => {
                eprintln!("{name}: not received: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Starts a producer, also of transactions, a simple consumer or a loop around one; `sql` takes the place of `tags`.
async fn start(r: &Request) -> Result<Value, Failure> {
    let (name, topic) = (r.text("name", "").to_string(), r.text("topic", "").to_string());
    let mut option = ClientOption::default();
    option.set_access_url(r.text("address", ""));
    if let Some(access_key) = r.0["access_key"].as_str() {
        option.set_access_key(access_key);
        option.set_secret_key(r.text("secret_key", ""));
    }
    let kind = r.text("kind", "");
    match kind {
        "producer" | "transactional" => {
            let mut of_producer = ProducerOption::default();
            of_producer.set_topics(vec![topic]);
            let mut client = if kind == "producer" {
                Producer::new(of_producer, option)?
            } else {
                let name = name.clone();
                let checker = Box::new(move |_, message| check(&name, message));
                Producer::new_transaction_producer(of_producer, option, checker)?
            };
            client.start().await?;
            state().producers.insert(name, Box::leak(Box::new(client)));
        }
        "simple" | "loop" => {
            let expression = match r.text("sql", "") {
                "" => FilterExpression::new(FilterType::Tag, r.text("tags", "*")),
                sql => FilterExpression::new(FilterType::Sql, sql),
            };
            let mut of_consumer = SimpleConsumerOption::default();
            of_consumer.set_consumer_group(r.text("group", ""));
            of_consumer.set_topics(vec![topic.clone()]);
            option.set_long_polling_timeout(r.seconds("wait_s", 20));
            let mut client = SimpleConsumer::new(of_consumer, option)?;
            client.start().await?;
            let consumer: &'static Consumer = Box::leak(Box::new(Consumer { client, topic, expression }));
            if kind == "loop" {
                tokio::spawn(listen(name.clone(), consumer, r.seconds("invisible_s", 10)));
            }
            state().consumers.insert(name, consumer);
        }
        _ => return Err(Failure::of_ours(format!("this client has no {kind} consumer"))),
    }
    Ok(Value::Null)
}

/// Builds a message; `deliver_at` is in seconds.
fn message(r: &Request, body: &str) -> Result<impl Message, ClientError> {
    let bytes = match r.number("body_bytes", 0) {
        0 => body.as_bytes().to_vec(),
        size => vec![b'x'; size as usize],
    };
    let mut message = MessageBuilder::builder().set_topic(r.text("topic", "")).set_body(bytes);
    if let Some(tag) = r.0["tag"].as_str().filter(|tag| !tag.is_empty()) {
        message = message.set_tag(tag);
    }
    if let Some(key) = r.0["key"].as_str() {
        message = message.set_keys(vec![key]);
    }
    if let Some(properties) = r.0["properties"].as_object() {
        let all = properties.iter().map(|(name, value)| (name.as_str(), value.as_str().unwrap_or("")));
        message = message.set_properties(all.collect());
    }
    if let Some(group) = r.0["message_group"].as_str() {
        message = message.set_message_group(group);
    }
    if let Some(at) = r.0["deliver_at"].as_i64() {
        message = message.set_delivery_timestamp(at);
    }
    if r.0["is_half"] == true {
        message = message.enable_transaction();
    }
    message.build()
}

/// Sends a message. A half message begins a transaction.
async fn send(r: &Request) -> Result<Value, Failure> {
    let message = message(r, r.text("body", "body"))?;
    if r.0["is_half"] != true {
        let receipt = producer(r)?.send(message).await?;
        return Ok(json!({"message_id": receipt.message_id()}));
    }
    let transaction = producer(r)?.send_transaction_message(message).await?;
    let id = transaction.message_id().to_string();
    let end: End = Box::new(|commits| match commits {
        true => transaction.commit(),
        false => transaction.rollback(),
    });
    state().transactions.insert(id.clone(), end);
    Ok(json!({"message_id": id}))
}

/// Sends a message for each of the `bodies`, all in one request.
async fn batch(r: &Request) -> Result<Value, Failure> {
    let bodies = r.0["bodies"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let messages = bodies.map(|body| message(r, body)).collect::<Result<Vec<_>, _>>()?;
    let receipts = producer(r)?.batch_send(messages).await?;
    Ok(receipts.iter().map(|receipt| receipt.message_id()).collect())
}

async fn end(r: &Request, commits: bool) -> Result<Value, Failure> {
    let end = state().transactions.remove(r.text("message_id", ""));
    end.ok_or_else(|| Failure::of_ours("no such transaction, or none any more".to_string()))?(commits).await?;
    Ok(Value::Null)
}

async fn receive(r: &Request) -> Result<Value, Failure> {
    let found = consumer(r)?.receive(r.number("batch", 32), r.seconds("invisible_s", 10)).await?;
    Ok(found.iter().map(describe).collect())
}

async fn ack(r: &Request) -> Result<Value, Failure> {
    let message = state().messages[r.number("token", 0) as usize - 1].clone();
    consumer(r)?.client.ack(&*message).await?;
    Ok(Value::Null)
}

async fn run(r: Request) -> Result<Value, Failure> {
    match r.text("do", "") {
        "start" => start(&r).await,
        "send" => send(&r).await,
        "batch" => batch(&r).await,
        "commit" => end(&r, true).await,
        "rollback" => end(&r, false).await,
        "receive" => receive(&r).await,
        "ack" => ack(&r).await,
        command => Err(Failure::of_ours(format!("this client has no {command}"))),
    }
}

/// Does one command and says how it went. A task of its own, because this client may panic.
async fn serve(r: Request) {
    let id = r.number("id", 0);
    match tokio::spawn(run(r)).await {
        Ok(Ok(answer)) => say(&json!({"id": id, "ok": answer})),
        Ok(Err(failure)) => {
            say(&json!({"id": id, "error": failure.text, "type": failure.kind, "code": failure.code}));
        }
        Err(panic) => say(&json!({"id": id, "error": panic.to_string(), "type": "panic", "code": null})),
    }
}

/// Serves until stdin ends; then it leaves without the client's own shutdown, like a process that is killed.
#[tokio::main]
async fn main() {
    say(&json!({"event": "ready"}));
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        tokio::spawn(serve(Request(serde_json::from_str(&line).unwrap())));
    }
    std::process::exit(0);
}
