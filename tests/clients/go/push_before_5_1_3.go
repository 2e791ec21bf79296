//go:build before_5_1_3

package main

import (
	"fmt"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
)

// newConsumer returns a simple consumer: this version has no others.
func newConsumer(r request, config *rmq.Config, subscriptions map[string]*rmq.FilterExpression) (client, error) {
	if r.Kind == "push" {
		return nil, fmt.Errorf("this version has no %s consumer", r.Kind)
	}
	return rmq.NewSimpleConsumer(config, rmq.WithSubscriptionExpressions(subscriptions),
		rmq.WithAwaitDuration(time.Duration(r.WaitS)*time.Second))
}

func speakPlainText() {
	panic("this version speaks TLS only")
}
