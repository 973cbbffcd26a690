"""What every query of every panel answers, and in which situation: dashboard -> panel -> (situation, a check for each query).
A check gets the entries [(labels, value)] and the facts of that moment, and says what is wrong, or nothing."""

import math

# Situations, in the order in which the test makes them.
STEADY, QUEUE, RESTARTED, SKIPPED, FULL, LOST, GONE = "steady", "queue", "restarted", "skipped", "full", "lost", "gone"
CLOSE = 1e-9
TAGS = {"weights", "gradients", "optimizer", "residual", "attn_q", "attn_kv", "attn_exchange", "attn_out", "attn_grad", "mlp", "logits",
        "comm", "workspace", "checkpoint"}
STAGES = {"projection", "exchange", "attention", "return", "mlp", "loss", "embedding", "weights", "gradients", "optimizer", "offload"}
OPERATIONS = {"all_to_all", "ring", "all_gather", "reduce_scatter", "all_reduce", "barrier"}
# A session ends, and begins again, where a busy machine kept its worker from speaking.
METHODS = {"JobService.Submit", "JobService.GetJob", "JobService.ListJobs", "JobService.Watch", "NodeService.ListNodes",
           "WorkerService.Session"}
PASSES = {"idle", "starting", "restoring", "embed", "forward", "loss", "backward", "optimizer", "evaluate", "checkpoint", "done"}


def is_close(found, wanted):
    return math.isclose(found, wanted, rel_tol=CLOSE, abs_tol=1e-6)


def equal(wanted):
    """One entry, of this value."""
    def check(entries, facts):
        expected = wanted(facts) if callable(wanted) else wanted
        ok = len(entries) == 1 and is_close(entries[0][1], expected)
        return None if ok else f"{entries} is not {expected}"
    return check


def each(by, wanted):
    """An entry for each value of these labels, and its value: {"a b": value}."""
    def check(entries, facts):
        expected = wanted(facts) if callable(wanted) else wanted
        found = {" ".join(" ".join(labels.get(label, "") for label in by.split()).split()): value for labels, value in entries}
        ok = set(found) == set(expected) and len(found) == len(entries) and all(is_close(found[key], expected[key]) for key in found)
        return None if ok else f"by {by}, {found} is not {expected}"
    return check


def within(low, high, count=None):
    """Every value lies between; count of entries, if it is known."""
    def check(entries, facts):
        bounds = [bound(facts) if callable(bound) else bound for bound in (low, high)]
        number = count(facts) if callable(count) else count
        ok = entries and (number is None or len(entries) == number) and all(bounds[0] <= value <= bounds[1] for _, value in entries)
        return None if ok else f"{entries} is not within {bounds}" + (f", {number} of them" if number else "")
    return check


def labelled(label, names, low, high, whole=True):
    """Values lie between; the label takes exactly these values (or, not whole, some of them)."""
    def check(entries, facts):
        expected = names(facts) if callable(names) else names
        found = {labels.get(label) for labels, _ in entries}
        ok = entries and (found == set(expected) if whole else found <= set(expected)) and all(low <= value <= high for _, value in entries)
        return None if ok else f"{entries}: {label} is not of {expected}, or not within {low} to {high}"
    return check


def told(member):
    """What rank 0 told at one of its last steps."""
    def check(entries, facts):
        values = [line[member] for line in facts.lines[-200:] if line.get(member) is not None]
        ok = len(entries) == 1 and any(is_close(entries[0][1], value) for value in values)
        return None if ok else f"{entries} is none of the last steps' {member}: {values[-5:]}"
    return check


def nothing():
    """No entry: what is asked for does not exist here."""
    return lambda entries, facts: f"{entries} should not be" if entries else None


def steady(*checks):
    return STEADY, checks


def ranks(part, member, pool="memory"):
    """rank -> bytes, of the plan or of the last report."""
    def values(facts):
        return {str(rank): float(memory[pool][member]) for rank, memory in enumerate(getattr(facts, part))}
    return values


def largest_by_tag(part, member):
    def values(facts):
        found = {}
        for memory in getattr(facts, part):
            for tag in memory["memory"]["tags"]:
                found[tag["tag"]] = max(found.get(tag["tag"], 0), float(tag[member]))
        return found
    return values


def attention_peaks(facts):
    return {tag: value for tag, value in largest_by_tag("reports", "peak_bytes")(facts).items() if tag.startswith("attn_")}


def total(values):
    return lambda facts: sum(values(facts).values())


PEAK, PLANNED = ranks("reports", "peak_bytes"), ranks("plans", "peak_bytes")
HOST_PEAK, HOST_PLANNED = ranks("reports", "peak_bytes", "host_memory"), ranks("plans", "peak_bytes", "host_memory")


def held(pool, when="bytes"):
    """Of all ranks, tags that hold nothing left out."""
    def values(facts):
        found = {}
        for report in facts.reports:
            for tag in report[pool]["tags"]:
                found[tag["tag"]] = found.get(tag["tag"], 0) + float(tag[when])
        return {tag: value for tag, value in found.items() if value > 0}
    return values


def of_limit(facts):
    return {rank: value / facts.limit for rank, value in PEAK(facts).items()}


def headroom(facts):
    return {rank: facts.limit - value for rank, value in PEAK(facts).items()}


def ones(facts):
    return {rank: 1.0 for rank in PEAK(facts)}


def zeros(facts):
    return {rank: 0.0 for rank in PEAK(facts)}


RANKS = ["0", "1"]
# Where the job was some seconds ago, and where it will be in as many: the scrape is not of the moment of the facts.
STEP = within(lambda f: f.past_step, lambda f: f.coming_step, 1)
CHECKPOINT = within(lambda f: f.past_step - 2 * f.every_steps, lambda f: f.coming_step, 1)
MEMORY = {
    "Closest to its limit": steady(equal(lambda f: max(of_limit(f).values()))),
    "Least headroom": steady(equal(lambda f: min(headroom(f).values()))),
    "Measured of planned": steady(equal(1)),
    "Planned − measured": steady(equal(0)),
    "Attention of its plan": steady(equal(1)),
    "Host peak": steady(equal(total(HOST_PEAK))),
    "Device memory by tag": steady(each("tag", held("memory", "at_peak_bytes")), equal(total(PLANNED)), equal(lambda f: 2 * f.limit)),
    "Held between steps": steady(each("tag", held("memory"))),
    "Peak against limit": steady(each("rank", of_limit)),
    "Tags, planned and measured": steady(
        each("tag", largest_by_tag("plans", "peak_bytes")), each("tag", largest_by_tag("reports", "peak_bytes")),
                                         each("tag", lambda f: dict.fromkeys(TAGS, 0.0))),
    "Ranks": steady(each("rank", PEAK), each("rank", PLANNED), each("rank", ranks("reports", "arena_bytes")),
                    each("rank", lambda f: dict.fromkeys(RANKS, f.limit))),
    "Planned minus measured, by rank": steady(each("rank", zeros)),
    "Headroom by rank": steady(each("rank", headroom)),
    "Host memory by tag": steady(each("tag", held("host_memory")), equal(total(HOST_PEAK)), equal(total(HOST_PLANNED)),
                                 nothing()),  # on CPUs nothing limits it
    "Host memory, planned minus measured": steady(each("rank", zeros)),
    "Device memory by job": steady(each("job", lambda f: {f.job: total(PEAK)(f)})),
    "Largest rank of each job": steady(each("job", lambda f: {f.job: max(PEAK(f).values())})),
    "Attention memory, peak and plan": steady(each("rank", ranks("reports", "attention_peak_bytes")),
                                              each("job", lambda f: {f.job: max(ranks("plans", "attention_peak_bytes")(f).values())})),
    "Peaks of attention tags": steady(each("tag", attention_peaks)),
    "Stage seconds of the last step": steady(labelled("stage", STAGES, 0, 5, whole=False)),
    "Attention memory against its plan": steady(each("rank", ones)),
}

THROUGHPUT = {
    "Tokens per second": steady(within(lambda f: f.rate * 0.7, lambda f: f.rate * 1.4, 1)),
    "Per device": steady(within(lambda f: f.rate * 0.35, lambda f: f.rate * 0.7, 1)),
    "Causal MFU": steady(within(lambda f: f.mfu(f.slowest), lambda f: f.mfu(f.fastest), 1)),
    "Step": steady(within(lambda f: f.fastest, lambda f: f.slowest, 1)),
    "Hidden share": steady(within(1e-6, 1, 1)),
    "Data wait": steady(within(1e-9, 0.2, 1)),
    "Tokens per second by job": steady(within(lambda f: f.rate * 0.7, lambda f: f.rate * 1.4, 1)),
    "Tokens per second and device": steady(within(lambda f: f.rate * 0.35, lambda f: f.rate * 0.7, 1)),
    "Causal MFU by job": steady(within(lambda f: f.mfu(f.slowest), lambda f: f.mfu(f.fastest), 1)),
    "Step seconds": steady(within(lambda f: f.fastest, lambda f: f.slowest, 1), within(1e-6, lambda f: f.slowest, 1)),
    "Where the time goes": steady(labelled("stage", STAGES, 0, 1)),
    "Hidden share by job": steady(labelled("job", lambda f: [f.job], 1e-6, 1)),
    "Bus bandwidth": steady(labelled("operation", OPERATIONS, 1e3, 1e12, whole=False)),
    "Time in collectives": steady(labelled("operation", OPERATIONS, 0, 1)),
    "Collectives per second": steady(labelled("operation", OPERATIONS, 0, 1e4)),
    "Data wait by rank": steady(labelled("rank", RANKS, 1e-9, 0.2)),
    "Straggler spread": steady(labelled("job", lambda f: [f.job], 1, 20)),
    "Own seconds by rank": steady(labelled("rank", RANKS, 1e-6, 5)),
    "Slowest ranks": steady(within(0, 1, 1), within(1, 20, 1), within(1e-6, 5, 1)),
}

JOB = {
    "Step": steady(STEP),
    "Ranks": steady(equal(2)),
    "Loss": steady(told("loss")),
    "Tokens per second": steady(told("tokens_per_second")),
    "At risk": steady(within(0, lambda f: 2 * f.every_steps + f.coming_step - f.past_step, 1)),
    "Checkpoint age": steady(within(0, 20, 1)),
    "Progress inside the step": steady(labelled("rank", RANKS, 0, 1)),
    "Ranks in each pass": steady(labelled("pass", PASSES, 0, 2)),
    "In place": steady(labelled("rank", RANKS, 0, 2)),
    "Layers done": steady(labelled("rank", RANKS, 0, 4), equal(4)),
    "Loss by step": steady(told("loss"), told("held_out_loss")),
    "Gradient norm": steady(told("grad_norm")),
    "Learning rate": steady(told("learning_rate")),
    "Skipped steps": (SKIPPED, [within(1, 1e6, 1)]),
    "Step seconds by rank": steady(labelled("rank", RANKS, 1e-4, 5), labelled("rank", RANKS, 1e-6, 5)),
    "Stage seconds": steady(labelled("stage", STAGES, 0, 5, whole=False)),
    "Memory against its limit": steady(each("rank", of_limit)),
    "Peak and plan": steady(each("rank", PEAK), equal(lambda f: max(PLANNED(f).values()))),
    "Steps and checkpoints": steady(STEP,
                                    CHECKPOINT),
    "Checkpoints": steady(within(1e-4, 10, 1)),
    "Checkpoint size": steady(equal(lambda f: f.checkpoint_bytes)),
    "Checkpoint problems": (FULL, [within(0.5, 50, 1)]),
    "Generations": (RESTARTED, [each("generation", lambda f: {str(f.generation): 2})]),
    "Where its ranks are": (RESTARTED, [labelled("generation", lambda f: [str(f.generation)], 1, 1e6)]),
}


CLUSTER = {
    "Running": steady(equal(1)),
    "Waiting": (QUEUE, [equal(2)]),
    "Slots in use": steady(equal(2 / 3)),
    "Workers lost": (LOST, [equal(1)]),
    "Goodput": (RESTARTED, [within(0.05, 0.999, 1)]),
    "Restarts": (RESTARTED, [within(1.9, 3, 1)]),
    "Jobs by state": (QUEUE, [each("state", {"planning": 0, "queued": 2, "starting": 0, "running": 1, "stopping": 0, "succeeded": 0,
                                             "failed": 0, "cancelled": 0})]),
    "Active jobs": (QUEUE, [each("state", {"planning": 0, "queued": 2, "starting": 0, "running": 1, "stopping": 0})]),
    "Jobs": steady(STEP, equal(2),
                   CHECKPOINT),
    "Queue by reason": (QUEUE, [each("reason", {"held": 1, "busy_slots": 1})]),
    "Queue wait": (RESTARTED, [within(0, 30, 1), within(0, 30, 1)]),
    "Slots": steady(each("state", {"free": 1, "taken": 2, "unknown": 0, "unavailable": 0})),
    "Workers": (LOST, [each("state", {"ready": 1, "suspect": 0, "lost": 1, "unknown": 0}), equal(1)]),
    "Slots of each worker": steady(each("worker", {"w0": 0, "w1": 1}), each("worker", {"w0": 2, "w1": 0}),
                                   each("worker", {"w0": 0, "w1": 0}), each("worker", {"w0": 0, "w1": 0}),
                                   each("worker", {"w0": 1, "w1": 1})),
    "Rank exits": (RESTARTED, [labelled("outcome", ["finished", "left", "killed", "failed", "not_started"], 0, 8)]),
    "Restarts by cause": (RESTARTED, [labelled("cause", ["signal", "stall"], 0.5, 2)]),
    "Time to restart": (RESTARTED, [within(0.01, 30, 1), within(0.01, 30, 1)]),
    "Goodput of the last hour": (RESTARTED, [within(0.05, 0.999, 1)]),
    "Lost steps": (RESTARTED, [within(0.5, 300, 1)]),
    "Stalls": (RESTARTED, [within(0.5, 2, 1)]),
    "Checkpoints": (FULL, [within(0, 50, 1), within(0.5, 50, 1)]),
}

COORDINATOR = {
    "Coordinator": (GONE, [equal(0)]),
    "Starts": steady(equal(1)),
    "Requests": (QUEUE, [within(0.01, 100, 1)]),
    "Request errors": (QUEUE, [within(1e-6, 0.999, 1)]),
    "Slowest commit": steady(within(1e-5, 10, 1)),
    "Longest silence": (LOST, [within(3, 60, 1)]),
    "Requests by method": (QUEUE, [labelled("method", METHODS, 1e-3, 100, whole=False)]),
    "Errors by method and code": (QUEUE, [labelled("code", ["not_found"], 1e-3, 100)]),
    "Latency by method": (QUEUE, [labelled("method", lambda f: f.methods, 0, 3600, whole=False)]),
    "Latency of all calls": (QUEUE, [within(1e-6, 60, 1), within(1e-6, 60, 1)]),
    "Store commits": steady(within(1e-6, 10, 1), within(1e-6, 10, 1)),
    "Writes": steady(within(1e-3, 100, 1)),
    "Decisions": steady(labelled("event", lambda f: f.events, 0, 1, whole=False)),
    "Events": steady(labelled("event", lambda f: f.events, 1e-3, 1e3, whole=False)),
    "Silence of workers": (LOST, [labelled("worker", ["w0", "w1"], -1, 60)]),
    "Connected workers": (LOST, [equal(1), equal(1)]),
    "Builds": steady(each("version backend isa", lambda f: {f.version: 1, f"{f.version} cpu {f.isa}": 2})),
    "Scrape targets": (LOST, [equal(2), equal(1)]),
}

EXPECTED = {"memory": MEMORY, "throughput": THROUGHPUT, "job": JOB, "cluster": CLUSTER, "coordinator": COORDINATOR}

# Alerts whose condition is made here, though not for as long as they want.
PROVOKED = {"UpipeCoordinatorAbsent": GONE, "UpipeTargetDown": LOST, "UpipeWorkerLost": LOST, "UpipeWorkerDisconnected": GONE,
            "UpipeQueueWaits": QUEUE, "UpipeJobStalled": RESTARTED, "UpipeStepsSkipped": SKIPPED,
            "UpipeCheckpointProblems": FULL}
# Of the others, what they compare exists, and is on the good side: a check of it.
QUIET = {
    "UpipeDeviceSick": each("worker", {"w0": 0, "w1": 0}),
    "UpipeSlotQuarantined": each("worker", {"w0": 0, "w1": 0}),
    "UpipeStoreCommitsSlow": within(1e-6, 10, 1),
    "UpipeRequestsFail": within(0, 0),
    "UpipeGoodputLow": within(0, 1, 1),
    "UpipeJobsRestartOften": within(0, 3),
    "UpipeNoStepProgress": labelled("job", lambda f: [f.job], 0, 5),
    "UpipeStraggler": labelled("job", lambda f: [f.job], 1, 20),
    "UpipeStepsSkipped": labelled("job", lambda f: [f.job], 0, 0),  # and before they are made
    "UpipeMemoryAbovePlan": within(0, 1, 4),
    "UpipeMemoryNearLimit": within(0, 0.98),
    "UpipeCheckpointOld": labelled("job", lambda f: [f.job], 0, 20),
}
# Steps of milliseconds are uneven, a job of seconds is mostly start, and the disk of a test is not its own.
MAY_HOLD = {"UpipeStraggler", "UpipeGoodputLow", "UpipeStoreCommitsSlow"}
RECORDED = {
    "job:upipe_tokens:rate5m": labelled("job", lambda f: [f.job], 1, 1e7),
    "job_operation:upipe_comm_bytes_per_second:ratio_rate5m": labelled("operation", OPERATIONS, 0, 1e12, whole=False),
    "job_rank_pool:upipe_memory_planned:ratio": within(1, 1, 4),
    "job_rank_pool:upipe_memory_limit:ratio": within(1e-6, 1),
    "job:upipe_job_own_seconds:max_over_median": labelled("job", lambda f: [f.job], 1, 20),
    "job:upipe_job_checkpoint_interval_seconds:mean6h": labelled("job", lambda f: [f.job], 1, 6 * 3600),
    "cluster:upipe_attempt_seconds_kept:ratio_rate1h": within(0, 1, 1),
    "cluster:upipe_store_commit_seconds:p99_10m": within(1e-6, 10, 1),
}
