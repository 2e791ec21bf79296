//go:build before_5_1_4

package main

import (
	"errors"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
)

func recallHandle(_ *rmq.SendReceipt) string {
	return ""
}

func recall(_ request) (any, error) {
	return nil, errors.New("this version cannot recall")
}
