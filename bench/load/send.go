package main

import (
	crand "crypto/rand"
	"flag"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

type sendOptions struct {
	address     string
	topic       string
	inFlight    int
	connections int
	seconds     float64
	warmUp      float64
	count       int
	batch       int
	rate        float64
	bodyBytes   int
	delayMinMs  int64
	delayMaxMs  int64
	deliverAtMs int64
	isWhole     bool
	isEcho      bool
}

type sendResult struct {
	Messages  int            `json:"messages"`
	Calls     int            `json:"calls"`
	CallsAll  int            `json:"calls_all"` // with those of the warm-up
	Seconds   float64        `json:"seconds"`
	PerS      float64        `json:"messages_per_s"`
	LatencyMs spread         `json:"latency_ms"`
	Codes     map[string]int `json:"codes"`
	WireBytes int            `json:"wire_bytes"`
	Offered   int            `json:"offered"` // calls that were due, at a rate; those nobody was free for are not made
	CPUSec    float64        `json:"cpu_s"`   // of this program
}

func sendFlags(arguments []string) (sendOptions, error) {
	var given sendOptions
	flags := flag.NewFlagSet("send", flag.ContinueOnError)
	flags.StringVar(&given.address, "address", "", "HOST:PORT")
	flags.StringVar(&given.topic, "topic", "bench-wire", "topic")
	flags.IntVar(&given.inFlight, "in-flight", 64, "calls in flight, over all connections")
	flags.IntVar(&given.connections, "connections", 1, "connections")
	flags.Float64Var(&given.seconds, "seconds", 5, "how long, if no count is given")
	flags.Float64Var(&given.warmUp, "warm-up", 0, "seconds before counting starts")
	flags.IntVar(&given.count, "count", 0, "messages to send; 0: until the time is up")
	flags.IntVar(&given.batch, "batch", 1, "messages per call")
	flags.Float64Var(&given.rate, "rate", 0, "messages per second; 0: as fast as answers come")
	flags.IntVar(&given.bodyBytes, "body", 200, "bytes of random body")
	flags.Int64Var(&given.delayMinMs, "delay-min", 0, "smallest delay, ms")
	flags.Int64Var(&given.delayMaxMs, "delay-max", 0, "largest delay, ms; 0: not delayed")
	flags.Int64Var(&given.deliverAtMs, "deliver-at", 0, "delivery time of all, epoch ms")
	flags.BoolVar(&given.isWhole, "whole-seconds", false, "delivery times are whole seconds, as the Python client's")
	flags.BoolVar(&given.isEcho, "echo", false, "do not read the answers")
	err := flags.Parse(arguments)
	return given, err
}

// sender is what the workers of one run share.
type sender struct {
	sendOptions
	ids     *ids
	headers *headers
	left    atomic.Int64 // messages still to send, if there is a count
	offered atomic.Int64
	ticks   chan struct{} // one per call, if there is a rate; closed at the end
	started time.Time     // counting starts here
	ending  time.Time
}

// tally is what one worker saw.
type tally struct {
	calls     int
	callsAll  int
	latencies []float64
	codes     map[string]int
	wireBytes int
	last      time.Time
}

func send(arguments []string) (any, error) {
	given, err := sendFlags(arguments)
	if err != nil {
		return nil, err
	}
	connections := make([]*lean, given.connections)
	for at := range connections {
		if connections[at], err = dialLean(given.address); err != nil {
			return nil, err
		}
		defer connections[at].Close()
	}
	run := &sender{sendOptions: given, ids: newIds(), headers: newHeaders()}
	run.left.Store(int64(given.count))
	run.started = time.Now().Add(time.Duration(given.warmUp * float64(time.Second)))
	run.ending = run.started.Add(time.Duration(given.seconds * float64(time.Second)))
	if given.rate > 0 {
		run.ticks = make(chan struct{}, 1_000_000)
		go run.tick()
	}
	tallies := make([]tally, given.inFlight)
	var workers sync.WaitGroup
	for at := range tallies {
		workers.Add(1)
		go func() {
			defer workers.Done()
			tallies[at] = run.work(connections[at%len(connections)])
		}()
	}
	workers.Wait()
	return run.result(tallies), nil
}

// tick keeps the pace by the clock: what a late tick missed is made up for.
func (run *sender) tick() {
	defer close(run.ticks)
	begun := time.Now()
	perCall := float64(run.batch)
	for issued := 0; ; time.Sleep(time.Millisecond) {
		now := time.Now()
		if run.count == 0 && now.After(run.ending) {
			return
		}
		due := int(now.Sub(begun).Seconds() * run.rate / perCall)
		for ; issued < due; issued++ {
			if run.count > 0 && issued*run.batch >= run.count {
				return
			}
			run.ticks <- struct{}{}
			run.offered.Add(1)
		}
	}
}

// next says how many messages the next call carries; 0 ends the worker.
func (run *sender) next() int {
	if run.ticks != nil {
		if _, ok := <-run.ticks; !ok {
			return 0
		}
		if run.count == 0 && time.Now().After(run.ending) {
			return 0 // ticks that nobody had the time for are given up: what counts is how many were taken
		}
	}
	if run.count == 0 {
		if run.ticks == nil && !time.Now().Before(run.ending) {
			return 0
		}
		return run.batch
	}
	left := run.left.Add(-int64(run.batch))
	if left >= 0 {
		return run.batch
	}
	return max(0, int(left)+run.batch)
}

func (run *sender) work(connection *lean) tally {
	seen := tally{codes: map[string]int{}}
	var seed [32]byte
	_, _ = crand.Read(seed[:])
	random := rand.NewChaCha8(seed)
	body := make([]byte, run.bodyBytes)
	for {
		count := run.next()
		if count == 0 {
			return seen
		}
		var request []byte
		now := time.Now()
		for range count {
			_, _ = random.Read(body)
			one := message(run.topic, run.ids.id(), body, now.UnixMilli(), run.dueMs(now))
			seen.wireBytes = len(one)
			request = bytesField(request, 1, one)
		}
		code, at := run.call(connection, request), time.Now()
		seen.callsAll++
		if at.Before(run.started) || (run.count == 0 && run.rate == 0 && at.After(run.ending)) {
			continue
		}
		seen.calls++
		seen.last = at
		seen.codes[code] += count
		seen.latencies = append(seen.latencies, float64(at.Sub(now).Microseconds())/1000)
	}
}

func (run *sender) dueMs(now time.Time) int64 {
	if run.deliverAtMs != 0 || run.delayMaxMs == 0 {
		return run.deliverAtMs
	}
	due := now.UnixMilli() + run.delayMinMs + rand.Int64N(run.delayMaxMs-run.delayMinMs+1)
	if run.isWhole {
		due = (due + 999) / 1000 * 1000
	}
	return due
}

func (run *sender) call(connection *lean, request []byte) string {
	response, status, err := connection.call(service+"SendMessage", run.headers.fields(), request)
	if err != nil {
		return "broken: " + err.Error()
	}
	if status != "0" {
		return "grpc " + status
	}
	if run.isEcho {
		return "20000"
	}
	code, err := statusCode(response)
	if err != nil {
		return "unreadable"
	}
	return code
}

func (run *sender) result(tallies []tally) sendResult {
	total := sendResult{Codes: map[string]int{}}
	var latencies []float64
	last := run.started
	for _, seen := range tallies {
		total.Calls += seen.calls
		total.CallsAll += seen.callsAll
		total.WireBytes = max(total.WireBytes, seen.wireBytes)
		latencies = append(latencies, seen.latencies...)
		for code, count := range seen.codes {
			total.Codes[code] += count
			total.Messages += count
		}
		if seen.last.After(last) {
			last = seen.last
		}
	}
	total.Seconds = last.Sub(run.started).Seconds()
	if total.Seconds > 0 {
		total.PerS = float64(total.Messages) / total.Seconds
	}
	total.LatencyMs = spreadOf(latencies)
	total.Offered = int(run.offered.Load())
	total.CPUSec = cpuSeconds()
	return total
}
