"""What panels ask Prometheus for, over its HTTP API."""

import json
import math
import urllib.error
import urllib.parse
import urllib.request


class Refused(Exception):
    """Prometheus does not answer, or not with data."""


class Prometheus:
    def __init__(self, url):
        self.url = url.rstrip("/")

    def ask(self, path, **parameters):
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise Refused(f"{json.load(error)['error']}: {parameters.get('query', path)}") from error
        except OSError as error:
            raise Refused(f"{self.url}: {error}") from error

    def now(self, expr, time):
        """[(labels, value)] at a moment."""
        data = self.ask("query", query=expr, time=time)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(entry["metric"], float(entry["value"][1])) for entry in data["result"]]

    def course(self, expr, start, end, step):
        """[(labels, [(time, value)])]; values that are not finite are left out."""
        data = self.ask("query_range", query=expr, start=start, end=end, step=step)
        found = []
        for entry in data["result"]:
            points = [(float(time), float(value)) for time, value in entry["values"]]
            found.append((entry["metric"], [(time, value) for time, value in points if math.isfinite(value)]))
        return found

    def label_values(self, selector, label, start, end):
        return self.ask(f"label/{label}/values", **{"match[]": selector}, start=start, end=end)
