"""Lists and watches ConfigMaps with HTTP libraries of Python in their usual configuration, all at the
same time, and prints each report as a line of JSON.

    decode.py TASK

TASK is JSON: the CA's file, a token, and the reads, each with its decoder, its name and its URL."""

import asyncio
import hashlib
import json
import ssl
import sys
import threading

import aiohttp
import requests
import urllib3

TASK = json.loads(sys.argv[1])
HEADERS = {"Authorization": f"Bearer {TASK['token']}"}


def main():
    blocking = {"requests": over_requests, "urllib3": over_urllib3}
    reads = [(read, blocking[read["decoder"]]) for read in TASK["reads"] if read["decoder"] in blocking]
    threads = [threading.Thread(target=report_all, args=each) for each in reads]
    for thread in threads:
        thread.start()
    asyncio.run(over_aiohttp([read for read in TASK["reads"] if read["decoder"] == "aiohttp"]))
    for thread in threads:
        thread.join()


def report_all(read, over):
    try:
        for line in over(read):
            report_line(read, line)
    except Exception as error:
        return report(read, {"end": "error", "error": f"{type(error).__name__}: {error}"})
    report(read, {"end": "clean"})


def over_requests(read):
    """requests asks for gzip by default."""
    with requests.get(read["url"], headers=HEADERS, verify=TASK["ca_file"], stream=True) as response:
        yield from response.iter_lines()


def over_urllib3(read):
    """urllib3 asks for gzip if its users let it make this header."""
    pool = urllib3.PoolManager(ca_certs=TASK["ca_file"])
    headers = HEADERS | urllib3.util.make_headers(accept_encoding=True)
    response = pool.request("GET", read["url"], headers=headers, preload_content=False)
    # `Watch` of the official Kubernetes client reads so.
    yield from lines(response.stream(decode_content=True))


def lines(chunks):
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


async def over_aiohttp(reads):
    """aiohttp asks for gzip by default."""
    trust = ssl.create_default_context(cafile=TASK["ca_file"])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust), headers=HEADERS) as session:
        await asyncio.gather(*(report_all_aiohttp(session, read) for read in reads))


async def report_all_aiohttp(session, read):
    try:
        async with session.get(read["url"]) as response:
            rest = b""
            # Its lines have at most 128 KiB.
            async for chunk in response.content.iter_any():
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    report_line(read, line)
            if rest:
                report_line(read, rest)
    except Exception as error:
        return report(read, {"end": "error", "error": f"{type(error).__name__}: {error}"})
    report(read, {"end": "clean"})


def report_line(read, line):
    value = json.loads(line)
    if read["is_list"]:
        for item in value["items"]:
            report_object(read, "ITEM", item)
    else:
        report_object(read, value["type"], value["object"])


def report_object(read, kind, value):
    digest = hashlib.sha256(value["data"]["payload"].encode()).hexdigest()
    metadata = value["metadata"]
    report(read, {"type": kind, "name": metadata["name"], "version": metadata["resourceVersion"], "digest": digest})


def report(read, value):
    # One write, so that the lines of threads do not mix.
    line = json.dumps({"decoder": read["decoder"], "read": read["read"], **value})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


main()
