package main

import (
	"context"
	"errors"
	"flag"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

type receiveOptions struct {
	address  string
	topic    string
	group    string
	count    int
	parallel int
	idle     float64
	isDeaf   bool
}

type receiveResult struct {
	Received   int            `json:"received"`
	Duplicates int            `json:"duplicates"`
	Early      int            `json:"early"`        // received before their delivery time
	EarlyQueue int            `json:"early_queued"` // stored in their queue before it, by the server's clock
	LatenessMs spread         `json:"lateness_ms"`
	Histogram  [][2]float64   `json:"histogram"` // of the lateness
	Seconds    float64        `json:"seconds"`
	LastAckMs  int64          `json:"last_ack_ms"` // when the last acknowledgement was answered, epoch
	Codes      map[string]int `json:"codes"`
	CPUSec     float64        `json:"cpu_s"` // of this program
}

// delivered is what counts of one message.
type delivered struct {
	id          string
	handle      string
	deliverAtMs int64
	storedAtMs  int64
	at          time.Time
}

// receiver is what the loops of one run share.
type receiver struct {
	receiveOptions
	headers *headers
	lock    sync.Mutex
	seen    map[string]time.Time // when each came first
	late    []float64
	found   receiveResult
	last    time.Time
	ended   context.Context
	end     context.CancelFunc
}

func receive(arguments []string) (any, error) {
	var given receiveOptions
	flags := flag.NewFlagSet("receive", flag.ContinueOnError)
	flags.StringVar(&given.address, "address", "", "HOST:PORT")
	flags.StringVar(&given.topic, "topic", "bench-wire", "topic")
	flags.StringVar(&given.group, "group", "bench-group", "consumer group")
	flags.IntVar(&given.count, "count", 0, "end after so many messages")
	flags.IntVar(&given.parallel, "parallel", 4, "receives in flight")
	flags.BoolVar(&given.isDeaf, "deaf", false, "acknowledge nothing")
	flags.Float64Var(&given.idle, "idle", 10, "end after so many seconds without a message")
	if err := flags.Parse(arguments); err != nil {
		return nil, err
	}
	connection, err := dial(given.address)
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	run, begun := newReceiver(given), time.Now()
	run.all(connection)
	run.found.Seconds = time.Since(begun).Seconds()
	run.found.LatenessMs = spreadOf(run.late)
	run.found.Histogram = histogramOf(run.late)
	run.found.CPUSec = cpuSeconds()
	return run.found, nil
}

func newReceiver(given receiveOptions) *receiver {
	run := &receiver{receiveOptions: given, headers: newHeaders(), seen: map[string]time.Time{}, last: time.Now()}
	run.found.Codes = map[string]int{}
	run.ended, run.end = context.WithCancel(context.Background())
	return run
}

// all receives until everything is there, or nothing comes any more.
func (run *receiver) all(connection *grpc.ClientConn) {
	var loops sync.WaitGroup
	for range run.parallel {
		loops.Add(1)
		go func() {
			defer loops.Done()
			for run.ended.Err() == nil {
				run.once(connection)
			}
		}()
	}
	loops.Wait()
}

// once is one long poll and one acknowledgement of all it brought.
func (run *receiver) once(connection *grpc.ClientConn) {
	got, code := run.poll(connection)
	if code != "20000" && code != "40401" && run.ended.Err() == nil {
		time.Sleep(100 * time.Millisecond)
	}
	run.note(got, code)
	if len(got) > 0 && !run.isDeaf {
		code := run.ack(connection, got)
		run.lock.Lock()
		run.found.Codes["ack "+code] += len(got)
		run.found.LastAckMs = time.Now().UnixMilli()
		run.lock.Unlock()
	}
	run.lock.Lock()
	defer run.lock.Unlock()
	if (run.count > 0 && len(run.seen) >= run.count) || time.Since(run.last).Seconds() > run.idle {
		run.end()
	}
}

func (run *receiver) poll(connection *grpc.ClientConn) ([]delivered, string) {
	topic := textField(nil, 2, run.topic)
	queue := protowire.AppendVarint(protowire.AppendTag(bytesField(nil, 1, topic), 2, protowire.VarintType), ^uint64(0))
	var request []byte
	request = bytesField(request, 1, textField(nil, 2, run.group))
	request = bytesField(request, 2, queue)
	request = bytesField(request, 3, textField(numberField(nil, 1, 1), 2, "*"))
	request = numberField(request, 4, 32)
	request = bytesField(request, 5, timestamp(30_000))
	request = bytesField(request, 7, timestamp(1_000))
	ctx, cancel := context.WithTimeout(run.ended, 6*time.Second)
	defer cancel()
	stream, err := connection.NewStream(
		run.headers.outgoing(ctx), &grpc.StreamDesc{ServerStreams: true}, service+"ReceiveMessage",
	)
	if err == nil {
		err = stream.SendMsg(&request)
	}
	if err == nil {
		err = stream.CloseSend()
	}
	var got []delivered
	code := "none"
	for err == nil {
		var frame []byte
		if err = stream.RecvMsg(&frame); err != nil {
			break
		}
		at := time.Now()
		_ = fields(frame, func(number protowire.Number, value []byte, _ uint64) {
			switch number {
			case 1:
				code, _ = statusCode(frame)
			case 2:
				got = append(got, read(value, at))
			}
		})
	}
	if !errors.Is(err, io.EOF) {
		code = "grpc " + status.Code(err).String()
	}
	return got, code
}

func read(message []byte, at time.Time) delivered {
	found := delivered{at: at}
	_ = fields(message, func(number protowire.Number, system []byte, _ uint64) {
		if number != 3 {
			return
		}
		_ = fields(system, func(number protowire.Number, value []byte, _ uint64) {
			switch number {
			case 3:
				found.id = string(value)
			case 9:
				found.storedAtMs = epochMs(value)
			case 11:
				found.deliverAtMs = epochMs(value)
			case 12:
				found.handle = string(value)
			}
		})
	})
	return found
}

func epochMs(timestamp []byte) int64 {
	var ms int64
	_ = fields(timestamp, func(number protowire.Number, _ []byte, varint uint64) {
		if number == 1 {
			ms += int64(varint) * 1000
		} else {
			ms += int64(varint) / 1_000_000
		}
	})
	return ms
}

func (run *receiver) note(got []delivered, code string) {
	run.lock.Lock()
	defer run.lock.Unlock()
	if run.ended.Err() == nil || len(got) > 0 {
		run.found.Codes[code] += max(1, len(got))
	}
	for _, each := range got {
		run.last = each.at
		if _, isKnown := run.seen[each.id]; isKnown {
			run.found.Duplicates++
			continue
		}
		run.seen[each.id] = each.at
		run.found.Received++
		if each.deliverAtMs == 0 {
			continue
		}
		late := float64(each.at.UnixMicro())/1000 - float64(each.deliverAtMs)
		if late < 0 {
			run.found.Early++
		}
		if each.storedAtMs < each.deliverAtMs {
			run.found.EarlyQueue++
		}
		run.late = append(run.late, late)
	}
}

func (run *receiver) ack(connection *grpc.ClientConn, got []delivered) string {
	var request []byte
	request = bytesField(request, 1, textField(nil, 2, run.group))
	request = bytesField(request, 2, textField(nil, 2, run.topic))
	for _, each := range got {
		request = bytesField(request, 3, textField(textField(nil, 1, each.id), 2, each.handle))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var response []byte
	if err := connection.Invoke(run.headers.outgoing(ctx), service+"AckMessage", &request, &response); err != nil {
		return "grpc " + status.Code(err).String()
	}
	code, err := statusCode(response)
	if err != nil {
		return "unreadable"
	}
	return code
}
