"""The examples of docs/how-to/rocketmq-cluster.md, each unchanged in a minimal program.

A program takes the address of a proxy and a time in epoch milliseconds, and ends once its message is sent.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.clients.java.jvm import SHORT_LIVED
from support.clients.official.builds import CLIENTS

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "rocketmq-cluster.md"
_SECONDS_MAX = 120
_PYTHON = """\
import sys
from rocketmq import ClientConfiguration, Credentials, Message, Producer

address, deliver_at_ms, body = sys.argv[1], int(sys.argv[2]), b"python"
producer = Producer(ClientConfiguration(address, Credentials()), ["dmq_inner_topic"])
producer.startup()
{block}
producer.shutdown()
"""
_ADAPTER = """\
import asyncio, sys
from broker_adapter import Message


async def main():
    deliver_at_ms = int(sys.argv[2])
    message = Message("orders", b"adapter")
{block}


asyncio.run(main())
"""
_JAVA = """\
import org.apache.rocketmq.client.apis.*;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.producer.Producer;

public class Example {{
    public static void main(String[] arguments) throws Exception {{
        long deliverAtMs = Long.parseLong(arguments[1]);
        byte[] body = "java".getBytes();
        ClientServiceProvider provider = ClientServiceProvider.loadService();
        Producer producer = provider.newProducerBuilder().setTopics("dmq_inner_topic").setClientConfiguration(
            ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(false).build()).build();
{block}
        System.exit(0);
    }}
}}
"""
_GO = """\
package main

import (
	"context"
	"os"
	"strconv"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

func send(ctx context.Context, producer golang.Producer, body []byte, deliverAtMs int64) error {{
{block}
	return err
}}

func main() {{
	golang.EnableSsl = false
	deliverAtMs, _ := strconv.ParseInt(os.Args[2], 10, 64)
	config := &golang.Config{{Endpoint: os.Args[1], Credentials: &credentials.SessionCredentials{{}}}}
	producer, err := golang.NewProducer(config, golang.WithTopics("dmq_inner_topic"))
	if err == nil {{
		err = producer.Start()
	}}
	if err == nil {{
		err = send(context.Background(), producer, []byte("go"), deliverAtMs)
	}}
	if err != nil {{
		panic(err)
	}}
}}
"""


def run_python(folder: Path, address: str, deliver_at_ms: int) -> None:
    """Send with the official Python client, as the page says."""
    (code,) = [each for each in blocks("python") if "message.add_property(" in each]
    _run_python(folder, _PYTHON.format(block=code), address, deliver_at_ms)


def run_adapter(folder: Path, address: str, deliver_at_ms: int) -> None:
    """Send with our own client and ``wrap``, as the page says."""
    (code,) = [each for each in blocks("python") if "wrap(" in each]
    code = code.replace("10.0.0.1:8081", address)
    _run_python(folder, _ADAPTER.format(block=_indented(code, "    ")), address, deliver_at_ms)


def run_java(folder: Path, address: str, deliver_at_ms: int) -> None:
    """Send with the official Java client, as the page says."""
    program = folder / "Example.java"
    program.write_text(_JAVA.format(block=block("java")), encoding="utf-8")
    libraries = f"{CLIENTS}/java/.cache/lib/*"
    _run(
        ["java", *SHORT_LIVED, f"-Duser.home={folder}", "-cp", libraries, str(program)], folder, address, deliver_at_ms
    )


def run_go(folder: Path, address: str, deliver_at_ms: int) -> None:
    """Send with the official Go client, as the page says."""
    program = folder / "example.go"
    program.write_text(_GO.format(block=block("go")), encoding="utf-8")
    built = folder / "example"
    subprocess.run(
        ["go", "build", "-mod=readonly", "-o", str(built), str(program)],
        cwd=CLIENTS / "go",
        check=True,
        timeout=_SECONDS_MAX,
    )
    _run([str(built)], folder, address, deliver_at_ms)


def block(language: str) -> str:
    """Return the only block of code of the page in a language."""
    (found,) = blocks(language)
    return found


def blocks(language: str) -> list[str]:
    """Return the blocks of code of the page in a language."""
    page = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def _run_python(folder: Path, text: str, address: str, deliver_at_ms: int) -> None:
    program = folder / "example.py"
    program.write_text(text, encoding="utf-8")
    _run([sys.executable, str(program)], folder, address, deliver_at_ms)


def _run(command: list[str], folder: Path, address: str, deliver_at_ms: int) -> None:
    subprocess.run(
        [*command, address, str(deliver_at_ms)],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        check=True,
        timeout=_SECONDS_MAX,
    )


def _indented(text: str, by: str) -> str:
    return "".join(by + line for line in text.splitlines(keepends=True))
