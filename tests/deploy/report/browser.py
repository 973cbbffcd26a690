"""Headless Chromium over its debugging pipe: opens a page at a width, tells what it complains about, evaluates
expressions, takes pictures, prints. Nothing but the standard library."""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

REPLY_SECONDS = 60


class Browser:
  def __init__(self):
    program = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
    if program is None:
      raise FileNotFoundError("no chromium on PATH: Debian's package is called chromium")
    self._profile = tempfile.TemporaryDirectory(prefix="upipe-browser-", ignore_cleanup_errors=True)  # it may still write
    to_browser, self._out = os.pipe()
    self._in, from_browser = os.pipe()

    def take_fds():  # the pipe is descriptors 3 and 4, by Chromium's rule
      read, write = os.dup(to_browser), os.dup(from_browser)
      os.dup2(read, 3)
      os.dup2(write, 4)

    self._process = subprocess.Popen(
        [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}",
         "about:blank"], preexec_fn=take_fds, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL)
    os.close(to_browser)
    os.close(from_browser)
    self._bytes = b""
    self._number = 0
    self._events = []
    target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
    self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.call(f"{domain}.enable")

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._process.terminate()
    self._process.wait()
    os.close(self._in)
    os.close(self._out)
    self._profile.cleanup()

  def _read(self):
    deadline = time.monotonic() + REPLY_SECONDS
    while b"\0" not in self._bytes:
      ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
      if not ready:
        raise TimeoutError(f"chromium said nothing for {REPLY_SECONDS} s")
      piece = os.read(self._in, 1 << 20)
      if not piece:
        raise EOFError("chromium has ended")
      self._bytes += piece
    message, self._bytes = self._bytes.split(b"\0", 1)
    return json.loads(message)

  def _call(self, method, parameters=None, session=None):
    self._number += 1
    message = {"id": self._number, "method": method, "params": parameters or {}}
    if session:
      message["sessionId"] = session
    os.write(self._out, json.dumps(message).encode() + b"\0")
    while True:
      answer = self._read()
      if answer.get("id") == self._number:
        if "error" in answer:
          raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]
      self._events.append(answer)

  def call(self, method, parameters=None):
    return self._call(method, parameters, self._session)

  def open(self, path, width, dark=False):
    """Opens the file at `path` in a window `width` pixels wide; returns what the page complained about and asked for."""
    self._events = []
    self.call("Emulation.setDeviceMetricsOverride",
              {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600})
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    self.call("Emulation.setEmulatedMedia", {"features": [scheme]})
    url = "file://" + os.path.abspath(path)
    self.call("Page.navigate", {"url": url})
    while not any(event["method"] == "Page.loadEventFired" for event in self._events):
      self._events.append(self._read())
    complaints = []
    for event in self._events:
      if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
        complaints.append(json.dumps(event["params"]))
      if event["method"] == "Network.requestWillBeSent" and event["params"]["request"]["url"] != url:
        complaints.append("asks for " + event["params"]["request"]["url"][:200])
    return complaints

  def evaluate(self, expression):
    result = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True})
    if "exceptionDetails" in result:
      raise RuntimeError(result["exceptionDetails"])
    return result["result"].get("value")

  def screenshot(self, path):
    picture = self.call("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})
    with open(path, "wb") as file:
      file.write(base64.b64decode(picture["data"]))

  def pdf(self):
    return base64.b64decode(self.call("Page.printToPDF", {"printBackground": True})["data"])
