package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"
)

const service = "/apache.rocketmq.v2.MessagingService/"

// Message types of the protocol.
const (
	typeNormal = 1
	typeDelay  = 3
)

func bytesField(to []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(to, number, protowire.BytesType), value)
}

func textField(to []byte, number protowire.Number, value string) []byte {
	return protowire.AppendString(protowire.AppendTag(to, number, protowire.BytesType), value)
}

func numberField(to []byte, number protowire.Number, value uint64) []byte {
	if value == 0 {
		return to
	}
	return protowire.AppendVarint(protowire.AppendTag(to, number, protowire.VarintType), value)
}

// timestamp is also a Duration: both are whole seconds and nanoseconds.
func timestamp(epochMs int64) []byte {
	var made []byte
	made = numberField(made, 1, uint64(epochMs/1000))
	return numberField(made, 2, uint64(epochMs%1000*1_000_000))
}

// ids makes message ids of version 1: 01, six bytes of host, two of process, four of seconds, four of a counter.
type ids struct {
	prefix string
	next   atomic.Uint32
}

func newIds() *ids {
	seconds := uint32(time.Since(time.Date(2021, 1, 1, 0, 0, 0, 0, time.UTC)) / time.Second)
	return &ids{prefix: fmt.Sprintf("01%016X%08X", rand.Uint64(), seconds)}
}

func (made *ids) id() string {
	return made.prefix + fmt.Sprintf("%08X", made.next.Add(1))
}

// message is what the official Python client sends: topic, system properties in their order, body.
func message(topic, id string, body []byte, bornMs, deliverAtMs int64) []byte {
	var system []byte
	system = textField(system, 3, id)
	system = numberField(system, 5, 1) // IDENTITY
	if deliverAtMs != 0 {
		system = numberField(system, 6, typeDelay)
	} else {
		system = numberField(system, 6, typeNormal)
	}
	system = bytesField(system, 7, timestamp(bornMs/1000*1000))
	system = textField(system, 8, "10.0.0.12")
	if deliverAtMs != 0 {
		system = bytesField(system, 11, timestamp(deliverAtMs))
	}
	var made []byte
	made = bytesField(made, 1, textField(nil, 2, topic))
	made = bytesField(made, 3, system)
	return bytesField(made, 4, body)
}

// fields calls visit for every length-delimited or varint field of a message.
func fields(message []byte, visit func(number protowire.Number, value []byte, varint uint64)) error {
	for len(message) > 0 {
		number, kind, size := protowire.ConsumeTag(message)
		if size < 0 {
			return protowire.ParseError(size)
		}
		message = message[size:]
		switch kind {
		case protowire.BytesType:
			value, size := protowire.ConsumeBytes(message)
			if size < 0 {
				return protowire.ParseError(size)
			}
			visit(number, value, 0)
			message = message[size:]
		case protowire.VarintType:
			value, size := protowire.ConsumeVarint(message)
			if size < 0 {
				return protowire.ParseError(size)
			}
			visit(number, nil, value)
			message = message[size:]
		default:
			size := protowire.ConsumeFieldValue(number, kind, message)
			if size < 0 {
				return protowire.ParseError(size)
			}
			message = message[size:]
		}
	}
	return nil
}

// statusCode reads field 1, a Status, of any response.
func statusCode(response []byte) (string, error) {
	var code uint64
	err := fields(response, func(number protowire.Number, value []byte, _ uint64) {
		if number == 1 && value != nil {
			_ = fields(value, func(number protowire.Number, _ []byte, varint uint64) {
				if number == 1 {
					code = varint
				}
			})
		}
	})
	return strconv.FormatUint(code, 10), err
}

// headers makes the metadata of a call: a new request id each time, a date and its signature each second.
type headers struct {
	clientID string
	second   atomic.Pointer[signed]
}

type signed struct {
	at        int64
	date      string
	signature string
}

func newHeaders() *headers {
	made := &headers{clientID: fmt.Sprintf("bench@%d@%08x", time.Now().Unix()%100_000, rand.Uint32())}
	made.second.Store(&signed{})
	return made
}

func (made *headers) outgoing(ctx context.Context) context.Context {
	sent := metadata.MD{}
	for _, field := range made.fields() {
		sent.Append(field.Name, field.Value)
	}
	return metadata.NewOutgoingContext(ctx, sent)
}

func (made *headers) fields() []hpack.HeaderField {
	now := time.Now()
	current := made.second.Load()
	if current.at != now.Unix() {
		date := now.Format("20060102T150405Z")
		mac := hmac.New(sha1.New, []byte("secret"))
		mac.Write([]byte(date))
		current = &signed{now.Unix(), date, hex.EncodeToString(mac.Sum(nil))}
		made.second.Store(current)
	}
	request := fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64())
	return []hpack.HeaderField{
		{Name: "x-mq-language", Value: "PYTHON"},
		{Name: "x-mq-protocol", Value: "GRPC_V2"},
		{Name: "x-mq-client-version", Value: "5.1.2"},
		{Name: "x-mq-date-time", Value: current.date},
		{Name: "x-mq-request-id", Value: request[:8] + "-" + request[8:12] + "-" + request[12:16] + "-" +
			request[16:20] + "-" + request[20:]},
		{Name: "x-mq-client-id", Value: made.clientID},
		{Name: "x-mq-namespace", Value: ""},
		{Name: "authorization", Value: "MQv2-HMAC-SHA1 Credential=key, SignedHeaders=x-mq-date-time, Signature=" +
			current.signature},
	}
}
