package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"time"
)

type wakeResult struct {
	WakeMs    spread         `json:"wake_ms"` // from the answer to the send until the message is here; may be below zero
	SendMs    spread         `json:"send_ms"`
	TotalMs   spread         `json:"total_ms"` // from the send until the message is here
	Histogram [][2]float64   `json:"histogram"`
	Received  int            `json:"received"`
	Codes     map[string]int `json:"codes"`
}

const (
	wakesUncounted = 20 // routes, groups and connections are made for the first ones
	wakeBodyBytes  = 200
)

// wake sends one message at a time to receives that wait, and tells how long each took to arrive.
func wake(arguments []string) (any, error) {
	var given receiveOptions
	var everyMs int
	flags := flag.NewFlagSet("wake", flag.ContinueOnError)
	flags.StringVar(&given.address, "address", "", "HOST:PORT")
	flags.StringVar(&given.topic, "topic", "bench-wire", "topic")
	flags.StringVar(&given.group, "group", "bench-group", "consumer group")
	flags.IntVar(&given.count, "count", 500, "messages that count")
	flags.IntVar(&given.parallel, "parallel", 4, "receives that wait")
	flags.IntVar(&everyMs, "every", 10, "ms between two sends, on average")
	flags.Float64Var(&given.idle, "idle", 10, "end after so many seconds without a message")
	if err := flags.Parse(arguments); err != nil {
		return nil, err
	}
	counted := given.count
	given.count += wakesUncounted
	senders, err := dialLean(given.address)
	if err != nil {
		return nil, err
	}
	defer senders.Close()
	receivers, err := dial(given.address)
	if err != nil {
		return nil, err
	}
	defer receivers.Close()
	run, isDone := newReceiver(given), make(chan struct{})
	go func() {
		defer close(isDone)
		run.all(receivers)
	}()
	sending := &sender{sendOptions: sendOptions{topic: given.topic}, headers: newHeaders()}
	made, body := newIds(), make([]byte, wakeBodyBytes)
	result := wakeResult{Codes: map[string]int{}}
	sent, answered := map[string]time.Time{}, map[string]time.Time{}
	for number := range given.count {
		time.Sleep(time.Duration(rand.Int64N(2 * int64(everyMs) * int64(time.Millisecond))))
		id, now := made.id(), time.Now()
		code := sending.call(senders, bytesField(nil, 1, message(given.topic, id, body, now.UnixMilli(), 0)))
		result.Codes[code]++
		if number >= wakesUncounted {
			sent[id], answered[id] = now, time.Now()
		}
	}
	<-isDone
	var wakes, sends, totals []float64
	for id, at := range answered {
		arrived, isHere := run.seen[id]
		if !isHere {
			return nil, fmt.Errorf("%d of %d messages were received", len(run.seen), given.count)
		}
		wakes = append(wakes, ms(arrived.Sub(at)))
		sends = append(sends, ms(at.Sub(sent[id])))
		totals = append(totals, ms(arrived.Sub(sent[id])))
	}
	result.Received = counted
	result.WakeMs, result.SendMs, result.TotalMs = spreadOf(wakes), spreadOf(sends), spreadOf(totals)
	result.Histogram = histogramOf(wakes)
	return result, nil
}

func ms(took time.Duration) float64 { return float64(took.Microseconds()) / 1000 }
