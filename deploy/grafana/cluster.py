"""The dashboards of the service itself: the cluster with its queue, and the coordinator."""

from panels import BAD, GOOD, PLAIN, WARN, bars, dashboard, lines, one, series, steps, table

NODE_COLORS = {"ready": GOOD, "suspect": WARN, "lost": BAD, "unknown": "#9a9da1"}
SLOT_COLORS = {"free": "#97bce6", "taken": "#1f4e8c", "unknown": "#9a9da1", "unavailable": BAD}
JOB_COLORS = {"planning": "#a78fd1", "queued": WARN, "starting": "#97bce6", "running": PLAIN, "stopping": "#9a9da1",
              "succeeded": GOOD, "failed": BAD, "cancelled": "#5c5f63"}
GOODPUT = ('sum(rate(upipe_attempt_seconds_total{outcome="kept"}[%s])) / sum(rate(upipe_attempt_seconds_total[%s]))')


def quantile(share, histogram, by="", window="$__rate_interval"):
    """Of what there was in the window; without it there is no value at all, rather than one that is no number."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket[{window}]))) >= 0"


def grown(counter, by=""):
    """How many in each stretch that a point of the panel stands for."""
    return f"sum{f' by ({by})' if by else ''} (increase({counter}[$__rate_interval]))"


def cluster():
    summary = [
        one("Running", "Jobs that train now.", "none", 'sum(upipe_jobs{state="running"})'),
        one("Waiting", "Jobs in the queue, for whatever reason.", "none", "sum(upipe_queue_length)",
            thresholds=steps((None, GOOD), (1, WARN))),
        one("Slots in use", "Of those on workers that are heard.", "percentunit",
            'sum(upipe_cluster_slots{state="taken"}) / sum(upipe_cluster_slots{state=~"taken|free"})', decimals=0),
        one("Workers lost", "Silent for longer than the expiry.", "none", 'sum(upipe_nodes{state="lost"})',
            thresholds=steps((None, GOOD), (1, BAD))),
        one("Goodput", "Of the time ranks were held, the part whose steps were kept, in the range shown.", "percentunit",
            GOODPUT % ("$__range", "$__range"), thresholds=steps((None, BAD), (0.8, WARN), (0.95, GOOD)), decimals=1),
        one("Restarts", "Attempts that ended in another one, in the range shown; drains among them.", "none",
            "sum(increase(upipe_restarts_total[$__range]))", decimals=0),
    ]
    jobs = [
        bars("Jobs by state", "All that the coordinator keeps a record of.", "none", "sum by (state) (upipe_jobs)", "{{state}}", width=6),
        lines("Active jobs", "Those that are not over.", "none",
              [series('sum by (state) (upipe_jobs{state=~"planning|queued|starting|running|stopping"})', "{{state}}")],
              stacked=True, colors=JOB_COLORS, width=9),
        table("Jobs", "That run: last step, ranks, step of the newest checkpoint.", {"job": "Job"},
              [("Step", "none", "max by (job) (upipe_job_step)"), ("Ranks", "none", "max by (job) (upipe_job_ranks)"),
               ("Checkpoint", "none", "max by (job) (upipe_job_checkpoint_step)")], width=9),
        lines("Queue by reason", "Why jobs wait, as `upipe why` answers.", "none",
              [series("sum by (reason) (upipe_queue_length > 0)", "{{reason}}")], stacked=True),
        lines("Queue wait", "From submit to the first running rank, of jobs that started in the last hour.", "s",
              [series(quantile(0.5, "upipe_queue_wait_seconds", window="1h"), "median"),
               series(quantile(0.95, "upipe_queue_wait_seconds", window="1h"), "95 %", color=WARN)]),
    ]
    places = [
        lines("Slots", "Free, taken, on silent workers, and those that take nothing: cordoned, quarantined, sick.", "none",
              [series("sum by (state) (upipe_cluster_slots)", "{{state}}")], stacked=True, colors=SLOT_COLORS),
        lines("Workers", "By state; cordoned ones, dashed, are among them.", "none",
              [series("sum by (state) (upipe_nodes)", "{{state}}"),
               series("sum(upipe_nodes_cordoned)", "cordoned", dashed=True)], stacked=True, colors=NODE_COLORS),
        table("Slots of each worker", "As the workers see them themselves.", {"worker": "Worker", "node": "Node"},
              [(state.capitalize(), "none", f'sum by (worker, node) (upipe_slots{{state="{state}"}})')
               for state in ("free", "taken", "quarantined", "sick")] +
              [("Connected", "none", "max by (worker, node) (upipe_worker_connected)")]),
        lines("Rank exits", "How ranks ended, all workers.", "none", [series(grown("upipe_rank_exits_total", "outcome"), "{{outcome}}")],
              points=True),
    ]
    trouble = [
        lines("Restarts by cause", "Attempts that ended and were queued again.", "none",
              [series("sum by (cause) (increase(upipe_restarts_total[$__rate_interval]) > 0)", "{{cause}}")], points=True),
        lines("Time to restart", "From the end of an attempt to the next one's running, in the last hour.", "s",
              [series(quantile(0.5, "upipe_restart_seconds", window="1h"), "median"),
               series(quantile(0.95, "upipe_restart_seconds", window="1h"), "95 %", color=WARN)]),
        lines("Goodput of the last hour", "Rank-seconds whose steps were kept, of all.", "percentunit",
              [series(GOODPUT % ("1h", "1h"), "goodput")],
              high=1),
        lines("Lost steps", "Steps that were made and had to be made again.", "none", [series(grown("upipe_lost_steps_total"), "steps")],
              points=True),
        lines("Stalls", "Attempts in which no rank moved within the stage deadline.", "none",
              [series(grown("upipe_stalls_total"), "stalls")],
              points=True),
        lines("Checkpoints", "Committed, and those that were not made or were passed over at a start.", "none",
              [series(grown("upipe_checkpoints_committed_total"), "committed", color=GOOD),
               series(grown("upipe_coordinator_checkpoint_problems_total"), "problems", color=BAD)], points=True),
    ]
    return dashboard("cluster", "Cluster and queue", "Jobs, slots and workers, why jobs wait, and what was lost to failures.", [],
                     [("Summary", summary), ("Jobs and queue", jobs), ("Slots and workers", places), ("Failures", trouble)])


def coordinator():
    # By the clock of the scrape, so that the time since then does not count.
    heard = "upipe_worker_last_heard_timestamp_seconds"
    silence = f"timestamp({heard}) - {heard}"
    failed = 'upipe_rpc_requests_total{code!~"ok|cancelled"}'
    summary = [
        one("Coordinator", "1 while it is scraped.", "none", "count(upipe_coordinator_epoch) or vector(0)",
            thresholds=steps((None, BAD), (1, GOOD))),
        one("Starts", "Grows at every start of the coordinator.", "none", "max(upipe_coordinator_epoch)"),
        one("Requests", "Calls a second, streams counted when they end.", "reqps", "sum(rate(upipe_rpc_requests_total[$__rate_interval]))"),
        one("Request errors", "Share of calls that failed; who hangs up (`cancelled`) is none of them.", "percentunit",
            f"(sum(rate({failed}[$__rate_interval])) or vector(0)) / sum(rate(upipe_rpc_requests_total[$__rate_interval]))", decimals=1),
        one("Slowest commit", "99 % of the store's commits are faster.", "s", quantile(0.99, "upipe_store_commit_seconds"),
            thresholds=steps((None, GOOD), (0.1, WARN), (1, BAD))),
        one("Longest silence", "Since the worker that was not heard for longest was heard.", "s", f"max({silence})",
            thresholds=steps((None, GOOD), (6, WARN), (300, BAD))),
    ]
    calls = [
        lines("Requests by method", "Calls a second.", "reqps",
              [series("sum by (method) (rate(upipe_rpc_requests_total[$__rate_interval]) > 0)", "{{method}}")]),
        lines("Errors by method and code", "Calls a second that failed; who hangs up (`cancelled`) is none of them.", "reqps",
              [series(f"sum by (method, code) (rate({failed}[$__rate_interval]) > 0)", "{{method}} {{code}}")]),
        lines("Latency by method", "99 % of the calls are faster; streams last as long as they are watched.", "s",
              [series(quantile(0.99, "upipe_rpc_seconds", "method"), "{{method}}")]),
        lines("Latency of all calls", "Median and 99 %.", "s",
              [series(quantile(0.5, "upipe_rpc_seconds"), "median"), series(quantile(0.99, "upipe_rpc_seconds"), "99 %", color=WARN)]),
    ]
    inside = [
        lines("Store commits", "Seconds from a decision to its being durable.", "s",
              [series(quantile(0.5, "upipe_store_commit_seconds"), "median"),
               series(quantile(0.99, "upipe_store_commit_seconds"), "99 %", color=WARN)]),
        lines("Writes", "Revisions of the store, a second.", "wps",
              [series("max(deriv(upipe_store_revision[$__rate_interval]))", "writes")]),
        lines("Decisions", "99 % of the decisions about an event are faster, the scheduler's pass included.", "s",
              [series(quantile(0.99, "upipe_coordinator_step_seconds", "event"), "{{event}}")]),
        lines("Events", "That were decided about, a second.", "ops",
              [series("sum by (event) (rate(upipe_coordinator_step_seconds_count[$__rate_interval]) > 0)", "{{event}}")]),
    ]
    workers = [
        lines("Silence of workers", "Since each was last heard; SUSPECT after three heartbeats, LOST after the expiry.", "s",
              [series(silence, "{{worker}}")]),
        lines("Connected workers", "Workers whose session is up, as they see it, and all that are scraped.", "none",
              [series("sum(upipe_worker_connected)", "connected", color=GOOD),
               series("count(upipe_worker_connected)", "scraped", dashed=True)]),
        table("Builds", "Versions of what is scraped.", {"version": "Version", "backend": "Backend", "isa": "Instruction set"},
              [("Processes", "none", "count by (version, backend, isa) (upipe_build_info)")]),
        lines("Scrape targets", "Endpoints of UPipe that answer Prometheus, and those that do not.", "none",
              [series('sum(up{job=~"upipe.*|.*/upipe.*"})', "up", color=GOOD),
               series('sum(1 - up{job=~"upipe.*|.*/upipe.*"})', "down", color=BAD)], stacked=True),
    ]
    return dashboard("coordinator", "Coordinator", "Whether the coordinator answers, how fast, and whom it hears.", [],
                     [("Summary", summary), ("Calls", calls), ("Inside", inside), ("Workers and scraping", workers)])
