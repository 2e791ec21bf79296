//go:build !before_5_1_4

package main

import (
	"context"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
)

func recallHandle(receipt *rmq.SendReceipt) string {
	return receipt.RecallHandle
}

func recall(r request) (any, error) {
	return named[rmq.Producer](r.Name).Recall(context.Background(), r.Topic, r.Handle)
}
