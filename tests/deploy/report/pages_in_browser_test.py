"""Pages of jobs as people see them: in headless Chromium at the widths of a phone and a desk, dark, and printed. Nothing
sticks out, nothing is complained about or fetched, every section is there with its numbers, small text stays readable.

Pictures of every page are left in the folder that UPIPE_PICTURES names, when it is set."""
import os
import re
import subprocess
import sys
import tempfile

from browser import Browser

PHONE, DESK = 320, 1280
SECTIONS = ["loss", "throughput", "mfu", "gradients", "step-time", "memory", "collectives", "positions", "timeline", "ranks",
            "course", "checkpoints", "configuration"]
# Against the width that was asked for: a page that sticks out makes the window's own width grow.
STUCK_OUT = """(width => {
  const out = [];
  for (const it of document.querySelectorAll('body *')) {
    if (it.closest('.scroll, pre') || it.closest('svg') && it.tagName !== 'svg') continue;
    const box = it.getBoundingClientRect();
    if (box.width > 0 && (box.right > width + 0.5 || box.left < -0.5)) {
      out.push(it.tagName + '.' + it.className + ' ' + box.left + ' to ' + box.right);
    }
  }
  const whole = document.documentElement.scrollWidth;
  if (whole > width) out.push('page ' + whole);
  return out;
})"""
# Text of pictures that are shown, as high as it is on the screen, and the first that leaves its picture's card.
SMALLEST_TEXT = """(() => {
  let least = 1000;
  for (const text of document.querySelectorAll('svg text')) {
    if (text.closest('svg').getBoundingClientRect().width === 0) continue;
    const scale = text.closest('svg').getBoundingClientRect().width / text.closest('svg').viewBox.baseVal.width;
    least = Math.min(least, parseFloat(getComputedStyle(text).fontSize) * scale);
  }
  return least;
})()"""
TEXT_OUTSIDE = """(() => {
  const out = [];
  for (const text of document.querySelectorAll('svg text')) {
    const box = text.getBoundingClientRect(), card = text.closest('section').getBoundingClientRect();
    if (box.width > 0 && (box.right > card.right + 0.5 || box.left < card.left - 0.5)) out.push(text.textContent);
  }
  return out;
})()"""

failures = []


def expect(holds, what):
  if not holds:
    failures.append(what)


def text_of(browser):
  return browser.evaluate("document.body.innerText")


def look(browser, folder, name, width, dark=False):
  where = f"{name} at {width} pixels{', dark' if dark else ''}"
  complaints = browser.open(f"{folder}/{name}.html", width, dark)
  expect(not complaints, f"{where}: {complaints[:3]}")
  stuck_out = browser.evaluate(f"{STUCK_OUT}({width})")
  expect(not stuck_out, f"{where}: sticks out: {stuck_out[:3]}")
  outside = browser.evaluate(TEXT_OUTSIDE)
  expect(not outside, f"{where}: text outside its card: {outside[:3]}")
  if browser.evaluate("document.querySelectorAll('svg').length") > 0:
    least = browser.evaluate(SMALLEST_TEXT)
    expect(least >= 9, f"{where}: text of {least:.1f} pixels")
  expect(browser.evaluate("document.title").startswith("UPipe: "), f"{where}: title {browser.evaluate('document.title')}")
  pictures = os.environ.get("UPIPE_PICTURES")
  if pictures:
    browser.screenshot(f"{pictures}/{name}-{width}{'-dark' if dark else ''}.png")


def check_whole(browser, folder):
  look(browser, folder, "whole", DESK)
  text = text_of(browser)
  for number in ["240 of 240", "151,234,560 parameters", "as planned, to the byte", "SIGNAL, rank 2 on w1",
                 "Step 240 of rank 3, generation 2", "heads_per_stage: 4", "1 restart"]:
    expect(number in text, f"whole: lacks {number!r}")
  for section in SECTIONS:
    shown = browser.evaluate(f"(document.getElementById('{section}') || document.body).offsetHeight")
    inside = browser.evaluate(f"!!document.getElementById('{section}')")
    expect(inside and shown > 40, f"whole: section {section} is not there or empty")
    expect(browser.evaluate(f"!!document.querySelector('nav a[href=\"#{section}\"]')"), f"whole: no link to {section}")
  background = "getComputedStyle(document.body).backgroundColor"
  light = browser.evaluate(background)
  look(browser, folder, "whole", PHONE, dark=True)
  expect(browser.evaluate(background) != light, "whole: dark is as light as light")
  for width, shown, hidden in ((PHONE, ".phone", ".desk"), (DESK, ".desk", ".phone")):
    browser.open(f"{folder}/whole.html", width)
    for name, wanted in ((shown, True), (hidden, False)):
      visible = browser.evaluate(f"document.querySelector('#loss {name}').offsetHeight > 0")
      expect(visible == wanted, f"whole at {width} pixels: {name} is {'hidden' if wanted else 'shown'}")
  pdf = browser.pdf()
  expect(pdf.startswith(b"%PDF") and len(pdf) > 50_000, f"whole: printed to {len(pdf)} bytes")
  pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
  expect(2 <= pages <= 14, f"whole: {pages} pages of paper")


def main():
  program = os.environ["UPIPE_BIN_DIR"] + "/../tests/upipe-sample-pages"
  with tempfile.TemporaryDirectory(prefix="upipe-pages-") as folder, Browser() as browser:
    subprocess.run([program, folder], check=True)
    names = sorted(name[:-len(".html")] for name in os.listdir(folder))
    expect(len(names) == 9, f"pages: {names}")
    check_whole(browser, folder)
    for name in names:
      expect(os.path.getsize(f"{folder}/{name}.html") < 2_000_000, f"{name}: not under 2 MB")
      look(browser, folder, name, PHONE)
      if name != "whole":
        look(browser, folder, name, DESK)
    browser.open(f"{folder}/hostile.html", DESK)
    expect("<script>document.title='taken'</script>" in text_of(browser), "hostile: its words are not shown as words")
    expect(browser.evaluate("document.querySelectorAll('script, img').length") == 0, "hostile: its words are markup")
  for failure in failures:
    print(f"pages_in_browser_test: {failure}", file=sys.stderr)
  sys.exit(1 if failures else 0)


main()
