// Load for the benches, native so that it is not the limit: sends and receives as an official client does on the wire,
// and prints one JSON object. Measures only; what the figures mean is decided by the Python beside it.
//
//	load send     --address HOST:PORT --topic T --in-flight 64 --seconds 5
//	load receive  --address HOST:PORT --topic T --group G --count N
//	load wake     --address HOST:PORT --topic T --group G --count N
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	if len(os.Args) < 2 {
		fail(fmt.Errorf("usage: load send|receive|wake [flags]"))
	}
	var result any
	var err error
	switch os.Args[1] {
	case "send":
		result, err = send(os.Args[2:])
	case "receive":
		result, err = receive(os.Args[2:])
	case "wake":
		result, err = wake(os.Args[2:])
	default:
		err = fmt.Errorf("unknown command %q", os.Args[1])
	}
	if err != nil {
		fail(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "load:", err)
	os.Exit(1)
}

// rawCodec hands message bytes through: what is measured is the server, not this program's protobuf.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(
		address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{}), grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithNoProxy(),
	)
}
