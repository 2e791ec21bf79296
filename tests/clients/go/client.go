// The official Go client in a process of its own, told what to do by JSON lines; see tests/support/clients/official/client.py.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"sort"
	"strings"
	"sync"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

// request is the union of what all commands take.
type request struct {
	ID           int               `json:"id"`
	Do           string            `json:"do"`
	Name         string            `json:"name"`
	Kind         string            `json:"kind"`
	Address      string            `json:"address"`
	Topic        string            `json:"topic"`
	Group        string            `json:"group"`
	Tags         string            `json:"tags"`
	SQL          string            `json:"sql"`
	WaitS        int               `json:"wait_s"`
	AccessKey    string            `json:"access_key"`
	SecretKey    string            `json:"secret_key"`
	Body         string            `json:"body"`
	BodyBytes    int               `json:"body_bytes"`
	Tag          string            `json:"tag"`
	Key          string            `json:"key"`
	Properties   map[string]string `json:"properties"`
	MessageGroup string            `json:"message_group"`
	DeliverAt    int64             `json:"deliver_at"`
	IsHalf       bool              `json:"is_half"`
	Handle       string            `json:"handle"`
	MessageID    string            `json:"message_id"`
	Batch        int32             `json:"batch"`
	InvisibleS   int               `json:"invisible_s"`
	Token        int               `json:"token"`
}

type line map[string]any

// client is what all three kinds have in common.
type client interface {
	Start() error
	GracefulStop() error
}

var (
	out          = os.Stdout
	outLock      sync.Mutex
	lock         sync.Mutex // guards what follows
	clients      = map[string]client{}
	messages     []*rmq.MessageView             // by token - 1
	transactions = map[string]rmq.Transaction{} // by the message id
	mended       = map[string]bool{}
)

var commands = map[string]func(request) (any, error){
	"start": start, "send": send, "commit": commit, "rollback": rollback, "recall": recall,
	"receive": receive, "ack": ack, "change": change, "mend": mend, "shutdown": shutdown,
}

func say(said line) {
	text := new(bytes.Buffer)
	encoder := json.NewEncoder(text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(said); err != nil {
		panic(err)
	}
	outLock.Lock()
	defer outLock.Unlock()
	if _, err := out.Write(text.Bytes()); err != nil {
		os.Exit(0) // nobody listens any more
	}
}

func text(value *string) string {
	if value == nil {
		return ""
	}
	return *value
}

// describe returns what a test looks at; `token` names the message in later commands.
func describe(message *rmq.MessageView) line {
	atMs := time.Now().UnixMilli()
	lock.Lock()
	messages = append(messages, message)
	token := len(messages)
	lock.Unlock()
	keys := append([]string{}, message.GetKeys()...)
	sort.Strings(keys)
	properties := message.GetProperties()
	if properties == nil {
		properties = map[string]string{}
	}
	var deliverAtMs int64
	if at := message.GetDeliveryTimestamp(); at != nil {
		deliverAtMs = at.UnixMilli()
	}
	return line{
		"token":         token,
		"topic":         message.GetTopic(),
		"message_id":    message.GetMessageId(),
		"body":          string(message.GetBody()),
		"tag":           text(message.GetTag()),
		"keys":          keys,
		"properties":    properties,
		"message_group": text(message.GetMessageGroup()),
		"deliver_at_ms": deliverAtMs,
		"attempt":       message.GetDeliveryAttempt(),
		"is_corrupted":  reflect.ValueOf(message).Elem().FieldByName("corrupted").Bool(), // it has no getter
		"at_ms":         atMs,
	}
}

// check reports every check and decides by the first word of the body: `commit`, `rollback`, or anything else.
func check(name string, message *rmq.MessageView) rmq.TransactionResolution {
	seen := describe(message)
	seen["event"], seen["client"] = "check", name
	say(seen)
	switch word, _, _ := strings.Cut(string(message.GetBody()), " "); word {
	case "commit":
		return rmq.COMMIT
	case "rollback":
		return rmq.ROLLBACK
	}
	return rmq.TransactionResolution(0) // unknown, which versions spell differently
}

// start starts a client. It gives its first answer 3 s, and is begun again where a slow machine took them.
func start(r request) (any, error) {
	started, err := begin(r)
	for again := 0; again < 3 && err != nil && strings.Contains(err.Error(), "DeadlineExceeded"); again++ {
		started, err = begin(r)
	}
	if err != nil {
		return nil, err
	}
	lock.Lock()
	clients[r.Name] = started
	lock.Unlock()
	if r.Kind == "loop" {
		go listen(r)
	}
	return nil, nil
}

// begin starts a producer, also of transactions, a consumer, or a loop around one; `sql` takes the place of `tags`.
func begin(r request) (client, error) {
	config := &rmq.Config{
		Endpoint:      r.Address,
		ConsumerGroup: r.Group,
		Credentials:   &credentials.SessionCredentials{AccessKey: r.AccessKey, AccessSecret: r.SecretKey},
	}
	expression := rmq.NewFilterExpression(r.Tags)
	if r.SQL != "" {
		expression = rmq.NewFilterExpressionWithType(r.SQL, rmq.SQL92)
	}
	subscriptions := map[string]*rmq.FilterExpression{r.Topic: expression}
	var started client
	var err error
	switch r.Kind {
	case "producer":
		started, err = rmq.NewProducer(config, rmq.WithTopics(r.Topic))
	case "transactional":
		checker := &rmq.TransactionChecker{Check: func(message *rmq.MessageView) rmq.TransactionResolution {
			return check(r.Name, message)
		}}
		started, err = rmq.NewProducer(config, rmq.WithTopics(r.Topic), rmq.WithTransactionChecker(checker))
	default:
		started, err = newConsumer(r, config, subscriptions)
	}
	if err == nil {
		err = started.Start()
	}
	return started, err
}

// listen receives, reports and acknowledges for ever: what an application writes whose client has no push consumer.
func listen(r request) {
	for {
		found, err := receive(r)
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: not received: %v\n", r.Name, err)
			time.Sleep(100 * time.Millisecond)
		}
		for _, seen := range found.([]line) {
			seen["event"], seen["client"] = "delivery", r.Name
			say(seen)
			acked := r
			acked.Token = seen["token"].(int)
			if _, err := ack(acked); err != nil {
				fmt.Fprintf(os.Stderr, "%s: not acknowledged: %v\n", r.Name, err)
			}
		}
	}
}

// named returns the client of a name, as the kind the caller needs.
func named[Kind client](name string) Kind {
	lock.Lock()
	defer lock.Unlock()
	return clients[name].(Kind)
}

// send sends a message; `deliver_at` is in milliseconds. A half message begins a transaction.
func send(r request) (any, error) {
	message := &rmq.Message{Topic: r.Topic, Body: []byte(r.Body)}
	if r.BodyBytes > 0 {
		message.Body = bytes.Repeat([]byte("x"), r.BodyBytes)
	}
	if r.Tag != "" {
		message.SetTag(r.Tag)
	}
	if r.Key != "" {
		message.SetKeys(r.Key)
	}
	for name, value := range r.Properties {
		any(message).(interface{ AddProperty(string, string) }).AddProperty(name, value) // since v5.0.1-rc.4
	}
	if r.MessageGroup != "" {
		message.SetMessageGroup(r.MessageGroup)
	}
	if r.DeliverAt != 0 {
		message.SetDelayTimestamp(time.UnixMilli(r.DeliverAt))
	}
	producer := named[rmq.Producer](r.Name)
	var receipts []*rmq.SendReceipt
	var err error
	if r.IsHalf {
		transaction := producer.BeginTransaction()
		if receipts, err = producer.SendWithTransaction(context.Background(), message, transaction); err == nil {
			lock.Lock()
			transactions[receipts[0].MessageID] = transaction
			lock.Unlock()
		}
	} else {
		receipts, err = producer.Send(context.Background(), message)
	}
	if err != nil {
		return nil, err
	}
	receipt := receipts[0]
	return line{"message_id": receipt.MessageID, "offset": receipt.Offset, "recall_handle": recallHandle(receipt)}, nil
}

func transaction(r request) rmq.Transaction {
	lock.Lock()
	defer lock.Unlock()
	return transactions[r.MessageID]
}

func commit(r request) (any, error) {
	return nil, transaction(r).Commit()
}

func rollback(r request) (any, error) {
	return nil, transaction(r).RollBack()
}

// receive receives once. This client tells of nothing there as an error; to an application it is an empty list.
func receive(r request) (any, error) {
	received, err := named[rmq.SimpleConsumer](r.Name).Receive(
		context.Background(), r.Batch, time.Duration(r.InvisibleS)*time.Second)
	found := []line{}
	if status, ok := rmq.AsErrRpcStatus(err); ok && status.Code == int32(v2.Code_MESSAGE_NOT_FOUND) {
		return found, nil
	}
	for _, message := range received {
		found = append(found, describe(message))
	}
	return found, err
}

func message(r request) *rmq.MessageView {
	lock.Lock()
	defer lock.Unlock()
	return messages[r.Token-1]
}

func ack(r request) (any, error) {
	return nil, named[rmq.SimpleConsumer](r.Name).Ack(context.Background(), message(r))
}

func change(r request) (any, error) {
	invisible := time.Duration(r.InvisibleS) * time.Second
	return nil, named[rmq.SimpleConsumer](r.Name).ChangeInvisibleDuration(message(r), invisible)
}

// mend lets the listener of a push consumer fail no more.
func mend(r request) (any, error) {
	lock.Lock()
	defer lock.Unlock()
	mended[r.Name] = true
	return nil, nil
}

func shutdown(r request) (any, error) {
	stopped := named[client](r.Name)
	lock.Lock()
	delete(clients, r.Name)
	lock.Unlock()
	return nil, stopped.GracefulStop()
}

// serve does one command and says how it went.
func serve(r request) {
	defer func() {
		if found := recover(); found != nil {
			say(line{"id": r.ID, "error": fmt.Sprint(found), "type": "panic", "code": nil})
		}
	}()
	answer, err := commands[r.Do](r)
	if err == nil {
		say(line{"id": r.ID, "ok": answer})
		return
	}
	said := line{"id": r.ID, "error": err.Error(), "type": fmt.Sprintf("%T", err), "code": nil}
	var status *rmq.ErrRpcStatus
	if errors.As(err, &status) {
		said["code"] = status.Code
	}
	say(said)
}

// main serves until stdin ends; then it leaves without the client's own shutdown, like a process that is killed.
func main() {
	if os.Getenv("CLIENT_TLS") == "off" {
		speakPlainText()
	}
	os.Stdout = os.Stderr // only protocol lines on stdout; whatever the client prints goes to stderr
	say(line{"event": "ready"})
	lines := bufio.NewReader(os.Stdin)
	for {
		read, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		r := request{Tags: "*", WaitS: 20, Body: "body", Batch: 32, InvisibleS: 10}
		if err := json.Unmarshal(read, &r); err != nil {
			panic(err)
		}
		go serve(r)
	}
}
