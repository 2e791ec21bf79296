package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// lean is a connection for unary calls and nothing else. What it saves beside grpc-go is the load generator's own time,
// which the server would lack: on a small machine both share the processors.
type lean struct {
	socket  net.Conn
	framer  *http2.Framer // reads from the socket, writes to pending
	encoder *hpack.Encoder
	block   bytes.Buffer

	lock    sync.Mutex // guards all below, and what is above but for reading
	room    sync.Cond  // the window or the number of streams has grown
	pending bytes.Buffer
	calls   map[uint32]*leanCall
	next    uint32
	window  int64 // bytes that may still be sent
	streams int   // that the server allows at once
	failed  error
	wake    chan struct{}
}

// leanCall is one call under way.
type leanCall struct {
	answer []byte
	status string
	err    error
	done   chan struct{}
}

const (
	leanWindow  = 1 << 24 // for answers, of the connection; sent anew when half of it is used
	leanStreams = 1 << 20
	leanSilence = 20 * time.Second // in which nothing comes although calls wait
	leanBuffer  = 1 << 16
	// The window that every stream begins with; those of single streams are not counted.
	leanRequestMax = 65_535 - 5
)

func dialLean(address string) (*lean, error) {
	socket, err := net.DialTimeout("tcp", address, 5*time.Second)
	if err != nil {
		return nil, err
	}
	made := &lean{
		socket:  socket,
		calls:   map[uint32]*leanCall{},
		next:    1,
		window:  65_535,
		streams: leanStreams,
		wake:    make(chan struct{}, 1),
	}
	made.room.L = &made.lock
	made.encoder = hpack.NewEncoder(&made.block)
	made.framer = http2.NewFramer(&made.pending, bufio.NewReaderSize(socket, leanBuffer))
	made.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	made.framer.SetReuseFrames()
	made.pending.WriteString(http2.ClientPreface)
	err = errors.Join(
		made.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: leanWindow}),
		made.framer.WriteWindowUpdate(0, leanWindow-65_535),
	)
	if err != nil {
		return nil, err
	}
	go made.write()
	go made.read()
	made.flush()
	return made, nil
}

// Close ends the connection; calls under way fail.
func (made *lean) Close() { _ = made.socket.Close() }

// call sends one message and returns the answer to it, with the status of gRPC.
func (made *lean) call(path string, headers []hpack.HeaderField, request []byte) ([]byte, string, error) {
	call := &leanCall{done: make(chan struct{})}
	if err := made.begin(call, path, headers, request); err != nil {
		return nil, "", err
	}
	made.flush()
	<-call.done
	return call.answer, call.status, call.err
}

func (made *lean) begin(call *leanCall, path string, headers []hpack.HeaderField, request []byte) error {
	body := make([]byte, 5, 5+len(request))
	if len(request) > leanRequestMax {
		return fmt.Errorf("a request has %d bytes, and %d are sent at most", len(request), leanRequestMax)
	}
	binary.BigEndian.PutUint32(body[1:], uint32(len(request)))
	body = append(body, request...)
	made.lock.Lock()
	defer made.lock.Unlock()
	for made.failed == nil && (made.window < int64(len(body)) || len(made.calls) >= made.streams) {
		made.room.Wait()
	}
	if made.failed != nil {
		return made.failed
	}
	made.window -= int64(len(body))
	id := made.next
	made.next += 2
	made.calls[id] = call
	made.block.Reset()
	for _, field := range [...]hpack.HeaderField{
		{Name: ":method", Value: "POST"},
		{Name: ":scheme", Value: "http"},
		{Name: ":path", Value: path},
		{Name: ":authority", Value: made.socket.RemoteAddr().String()},
		{Name: "content-type", Value: "application/grpc"},
		{Name: "user-agent", Value: "grpc-python-asyncio/1.60.0"},
		{Name: "te", Value: "trailers"},
		{Name: "grpc-timeout", Value: strconv.Itoa(9_990_000+int(id)%9_999) + "u"},
	} {
		_ = made.encoder.WriteField(field)
	}
	for _, field := range headers {
		_ = made.encoder.WriteField(field)
	}
	head := http2.HeadersFrameParam{StreamID: id, BlockFragment: made.block.Bytes(), EndHeaders: true}
	err := made.framer.WriteHeaders(head)
	for size := 16_384; err == nil; { // no larger frame than every server takes
		part := body[:min(size, len(body))]
		body = body[len(part):]
		err = made.framer.WriteData(id, len(body) == 0, part)
		if len(body) == 0 {
			break
		}
	}
	return err
}

func (made *lean) flush() {
	select {
	case made.wake <- struct{}{}:
	default: // it is awake already
	}
}

// write puts on the wire, in one piece, what has gathered since the last time.
func (made *lean) write() {
	var taken bytes.Buffer
	for range made.wake {
		made.lock.Lock()
		taken.Reset()
		_, _ = taken.Write(made.pending.Bytes())
		made.pending.Reset()
		failed := made.failed
		made.lock.Unlock()
		if failed != nil {
			return
		}
		if taken.Len() > 0 {
			if _, err := made.socket.Write(taken.Bytes()); err != nil {
				made.fail(err)
				return
			}
		}
	}
}

func (made *lean) read() {
	used := 0
	for {
		_ = made.socket.SetReadDeadline(time.Now().Add(leanSilence))
		frame, err := made.framer.ReadFrame()
		if err == nil {
			err = made.take(frame, &used)
		}
		if err != nil {
			made.fail(err)
			return
		}
	}
}

func (made *lean) take(frame http2.Frame, used *int) error {
	made.lock.Lock()
	defer made.lock.Unlock()
	switch frame := frame.(type) {
	case *http2.DataFrame:
		if call := made.calls[frame.StreamID]; call != nil {
			call.answer = append(call.answer, frame.Data()...)
		}
		if frame.StreamEnded() {
			made.finish(frame.StreamID, errors.New("a stream ended without a status"))
		}
		*used += int(frame.Length)
		if *used > leanWindow/2 {
			increment := uint32(*used)
			*used = 0
			made.flush()
			return made.framer.WriteWindowUpdate(0, increment)
		}
	case *http2.MetaHeadersFrame:
		for _, field := range frame.Fields {
			if call := made.calls[frame.StreamID]; call != nil && field.Name == "grpc-status" {
				call.status = field.Value
			}
		}
		if frame.StreamEnded() {
			made.finish(frame.StreamID, nil)
		}
	case *http2.RSTStreamFrame:
		made.finish(frame.StreamID, fmt.Errorf("a stream was reset: %s", frame.ErrCode))
	case *http2.WindowUpdateFrame:
		if frame.StreamID == 0 {
			made.window += int64(frame.Increment)
			made.room.Broadcast()
		}
	case *http2.SettingsFrame:
		if frame.IsAck() {
			return nil
		}
		if streams, isTold := frame.Value(http2.SettingMaxConcurrentStreams); isTold {
			made.streams = int(min(streams, leanStreams))
		}
		made.flush()
		return made.framer.WriteSettingsAck()
	case *http2.PingFrame:
		if !frame.IsAck() {
			made.flush()
			return made.framer.WritePing(true, frame.Data)
		}
	case *http2.GoAwayFrame:
		return fmt.Errorf("the server goes away: %s", frame.ErrCode)
	}
	return nil
}

// finish is called with the lock held.
func (made *lean) finish(id uint32, err error) {
	call := made.calls[id]
	if call == nil {
		return
	}
	delete(made.calls, id)
	if len(call.answer) >= 5 {
		call.answer = call.answer[5:]
	}
	call.err = err
	close(call.done)
	made.room.Signal()
}

func (made *lean) fail(err error) {
	made.lock.Lock()
	defer made.lock.Unlock()
	if made.failed != nil {
		return
	}
	made.failed = err
	for id := range made.calls {
		made.finish(id, err)
	}
	made.room.Broadcast()
	made.flush()
	_ = made.socket.Close()
}
