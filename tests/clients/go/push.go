//go:build !before_5_1_3

package main

import (
	"fmt"
	"strings"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
)

// consume reports every message; it fails those whose body says so, as often as it says (`fail 2 times`), until mended.
// A body that begins with `hang` keeps it on the first attempt.
func consume(name string, message *rmq.MessageView) rmq.ConsumerResult {
	seen := describe(message)
	seen["event"], seen["client"] = "delivery", name
	say(seen)
	lock.Lock()
	isMended := mended[name]
	lock.Unlock()
	if strings.HasPrefix(string(message.GetBody()), "hang ") && message.GetDeliveryAttempt() == 1 {
		select {}
	}
	var times int32
	if _, err := fmt.Sscanf(string(message.GetBody()), "fail %d", &times); err == nil && !isMended &&
		message.GetDeliveryAttempt() <= times {
		return rmq.FAILURE
	}
	return rmq.SUCCESS
}

// newConsumer returns a simple or a push consumer.
func newConsumer(r request, config *rmq.Config, subscriptions map[string]*rmq.FilterExpression) (client, error) {
	if r.Kind != "push" {
		return rmq.NewSimpleConsumer(config, rmq.WithSimpleSubscriptionExpressions(subscriptions),
			rmq.WithSimpleAwaitDuration(time.Duration(r.WaitS)*time.Second))
	}
	listener := &rmq.FuncMessageListener{Consume: func(message *rmq.MessageView) rmq.ConsumerResult {
		return consume(r.Name, message)
	}}
	return rmq.NewPushConsumer(config, rmq.WithPushSubscriptionExpressions(subscriptions),
		rmq.WithPushMessageListener(listener))
}

func speakPlainText() {
	rmq.EnableSsl = false
}
