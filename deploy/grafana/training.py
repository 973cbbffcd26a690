"""The dashboards of what runs: memory, throughput, one job. Series of a worker say where; who runs there comes from
upipe_attempt_info, joined by worker and slot (several workers may share a node). topk: one occupant of a slot, also where
Prometheus missed an end and still shows two; without it the whole panel would fail."""

from panels import (BAD, GOOD, PLAIN, STAGE_COLORS, TAG_COLORS, WARN, bars, dashboard, lines, one, series, steps, table,
                    variable)

SHOWN = 'upipe_attempt_info{job=~"$job", node=~"$node", slot=~"$slot"}'
JOB = 'upipe_attempt_info{job=~"$job"}'
RANK = "{{job}} rank {{rank}}"
LIMIT_COLOR, PLAN_COLOR = BAD, "#5c5f63"
NEAR_LIMIT = steps((None, GOOD), (0.9, WARN), (0.97, BAD))
WITHIN_PLAN = steps((None, GOOD), (1.0000001, BAD))


def of(expr, occupants=SHOWN):
    """Of the ranks that are shown, with their job and rank as labels."""
    return joined(expr, "job, rank", occupants)


def joined(expr, labels, occupants):
    return f"{expr} * on (worker, slot) group_left ({labels}) topk by (worker, slot) (1, {occupants})"


def memory():
    def pool(name, extra=""):
        return f'{name}{{pool="device"{extra}}}'

    def host(name):
        return f'{name}{{pool="host"}}'

    peak, planned, limit = (pool(f"upipe_memory_{name}_bytes") for name in ("peak", "planned", "limit"))
    host_peak, host_planned, host_limit = (host(f"upipe_memory_{name}_bytes") for name in ("peak", "planned", "limit"))
    summary = [
        one("Closest to its limit", "The rank whose peak takes most of what its worker lets it allocate.", "percentunit",
            f"max({of(f'{peak} / {limit}')})", thresholds=NEAR_LIMIT, decimals=1),
        one("Least headroom", "Limit minus peak, of the rank with the least.", "bytes", f"min({of(f'({limit} - {peak})')})"),
        one("Measured of planned", "Highest peak of any rank over its planned peak. On CPU a finished step is at 100 %; above it the "
            "plan was wrong.", "percentunit", f"max({of(f'{peak} / {planned}')})", thresholds=WITHIN_PLAN, decimals=1),
        one("Planned − measured", "Of the rank where it is least; below zero the plan was exceeded.", "bytes",
            f"min({of(f'({planned} - {peak})')})", thresholds=steps((None, BAD), (0, GOOD))),
        one("Attention of its plan", "Peak of the attn_* tags together over what was planned for them, highest rank.", "percentunit",
            f"max({of('upipe_attention_peak_bytes / upipe_attention_planned_bytes')})", thresholds=WITHIN_PLAN, decimals=1),
        one("Host peak", "Peak of the host pools of all shown ranks: offloaded activations, snapshots of checkpoints.", "bytes",
            f"sum({of(host_peak)})"),
    ]
    device = [
        lines("Device memory by tag", "What the shown ranks held at their peaks, stacked by tag, below what was planned and what they may "
              "take. Choose one slot to see one rank.", "bytes",
              [series(f"sum by (tag) ({of(pool('upipe_memory_tag_at_peak_bytes'))} > 0)", "{{tag}}"),
               series(f"sum({of(planned)})", "planned peak", dashed=True, color=PLAN_COLOR),
               series(f"sum({of(limit)})", "limit", dashed=True, color=LIMIT_COLOR)],
              stacked=True, colors=TAG_COLORS, width=16, height=11),
        bars("Peak against limit", "Peak of each rank; a full bar is all that its worker lets it allocate.", "percentunit",
             of(f"{peak} / {limit}"), RANK, high=1, thresholds=NEAR_LIMIT, height=11),
        table("Tags, planned and measured", "Own peak of each tag, of the rank that held most of it; a positive difference is planned "
              "and not used.", {"tag": "Tag"},
              [("Planned", "bytes", f"max by (tag) ({of(pool('upipe_memory_planned_tag_peak_bytes'))})"),
               ("Measured", "bytes", f"max by (tag) ({of(pool('upipe_memory_tag_peak_bytes'))})"),
               ("Difference", "bytes", "max by (tag) (" + of(
                   f"({pool('upipe_memory_planned_tag_peak_bytes')} - {pool('upipe_memory_tag_peak_bytes')})") + ")")], height=10),
        table("Ranks", "Where each rank is, and its bytes. The arena is what was taken from the machine.",
              {"job": "Job", "rank": "Rank", "worker": "Worker", "slot": "Slot"},
              [(title, "bytes", f"sum by (job, rank, worker, slot) ({of(pool(f'upipe_memory_{name}_bytes'))})")
               for title, name in (("Peak", "peak"), ("Planned", "planned"), ("Arena", "arena"), ("Limit", "limit"))], height=10),
        lines("Planned minus measured, by rank", "Planned peak minus peak so far: it falls to its end within the first step and stays "
              "there.", "bytes", [series(of(f"({planned} - {peak})"), RANK)], thresholds=steps((None, BAD), (0, GOOD)),
              soft_low=0, width=8),
        lines("Headroom by rank", "Limit minus peak.", "bytes", [series(of(f"({limit} - {peak})"), RANK)], width=8),
        lines("Held between steps", "What stays when a step is over, by tag.", "bytes",
              [series(f"sum by (tag) ({of(pool('upipe_memory_bytes'))} > 0)", "{{tag}}")], stacked=True, colors=TAG_COLORS,
              width=8),
    ]
    hosts = [
        lines("Host memory by tag", "What the shown ranks hold in their host pools after their last step: snapshots of checkpoints, "
              "offloaded layer inputs.", "bytes",
              [series(f"sum by (tag) ({of(host('upipe_memory_bytes'))} > 0)", "{{tag}}"),
               series(f"sum({of(host_peak)})", "peak", dashed=True, color=PLAIN),
               series(f"sum({of(host_planned)})", "planned peak", dashed=True, color=PLAN_COLOR),
               series(f"sum({of(host_limit)})", "limit", dashed=True, color=LIMIT_COLOR)],
              stacked=True, colors=TAG_COLORS),
        lines("Host memory, planned minus measured", "By rank; below zero the plan was exceeded.", "bytes",
              [series(of(f"({host_planned} - {host_peak})"), RANK)], soft_low=0),
    ]
    jobs = [
        lines("Device memory by job", "Peaks of all ranks of each job together.", "bytes",
              [series(f"sum by (job) ({of(peak)})", "{{job}}")], stacked=True),
        bars("Largest rank of each job", "Highest peak of a rank.", "bytes", f"max by (job) ({of(peak)})", "{{job}}", width=12),
    ]
    stages = [
        lines("Attention memory, peak and plan", "Peak of the attn_* tags together: what head chunks make small. One head chunk's "
              "queries, keys, outputs and their gradients, and what waits in an exchange.", "bytes",
              [series(of("upipe_attention_peak_bytes"), RANK),
               series(f"max by (job) ({of('upipe_attention_planned_bytes')})", "{{job}}, planned", dashed=True, color=PLAN_COLOR)]),
        bars("Peaks of attention tags", "Own peak of each, of the rank that held most of it.", "bytes",
             "max by (tag) (" + of(pool("upipe_memory_tag_peak_bytes", ', tag=~"attn_.+"')) + ")", "{{tag}}", width=12),
        lines("Stage seconds of the last step", "Mean over the shown ranks: projection, exchange to head owners, attention, return of "
              "outputs, and the rest of the step.", "s",
              [series(f"avg by (stage) ({of('upipe_step_stage_seconds')})", "{{stage}}")], stacked=True, colors=STAGE_COLORS),
        bars("Attention memory against its plan", "A full bar is all that was planned for the attn_* tags.", "percentunit",
             of("upipe_attention_peak_bytes / upipe_attention_planned_bytes"), RANK, high=1, thresholds=WITHIN_PLAN, width=12),
    ]
    return dashboard("memory", "Memory", "Bytes of every rank by tag, measured against planned and against the limit.", places(), [
        ("Summary", summary), ("Device memory", device), ("Host memory", hosts), ("Jobs", jobs), ("UPipe stages", stages)])


def places():
    return [variable("job", "Job", "label_values(upipe_attempt_info, job)"),
            variable("node", "Node", 'label_values(upipe_attempt_info{job=~"$job"}, node)'),
            variable("slot", "Slot", 'label_values(upipe_attempt_info{job=~"$job", node=~"$node"}, slot)')]


def rate(counter):
    return f"rate({counter}[$__rate_interval])"


def throughput():
    rank_0 = SHOWN.replace("}", ', rank="0"}')
    tokens = f"sum by (job) ({of(rate('upipe_tokens_total'), rank_0)})"
    ranks = f"count by (job) ({JOB})"
    exchanged = of(rate('upipe_stage_seconds_total{stage=~"exchange|return|weights|gradients|offload"}'))
    hidden = of(rate("upipe_hidden_seconds_total"))
    hidden_share = f"sum by (job) ({hidden}) / (sum by (job) ({exchanged}) > 0)"
    spread = 'upipe_job_own_seconds_max{job=~"$job"} / upipe_job_own_seconds_median{job=~"$job"}'
    summary = [
        one("Tokens per second", "Of all shown jobs.", "short", f"sum({tokens})"),
        one("Per device", "Tokens per second of a job over its ranks, mean over jobs.", "short", f"avg({tokens} / {ranks})"),
        one("Causal MFU", "Model FLOPs (6 per parameter and token, causal attention) over the peak rate of the devices.", "percentunit",
            f"avg({of('upipe_causal_mfu_ratio')})", decimals=1),
        one("Step", "Seconds of the last step, of the slowest job.", "s", f"max({of('upipe_step_seconds')})"),
        one("Hidden share", "Of the time of exchanges and copies, what passed while the rank computed.", "percentunit",
            f"avg({hidden_share})", decimals=1),
        one("Data wait", "Share of time in which ranks waited for tokens.", "percentunit", f"max({of(rate('upipe_data_seconds_total'))})",
            thresholds=steps((None, GOOD), (0.02, WARN), (0.1, BAD)), decimals=2),
    ]
    speed = [
        lines("Tokens per second by job", "All ranks of a job together.", "short", [series(tokens, "{{job}}")]),
        lines("Tokens per second and device", "Of a job over its ranks.", "short", [series(f"{tokens} / {ranks}", "{{job}}")]),
        lines("Causal MFU by job", "Mean over ranks, of the last step.", "percentunit",
              [series(f"avg by (job) ({of('upipe_causal_mfu_ratio')})", "{{job}}")]),
        lines("Step seconds", "Last step of each job and, dashed, the time outside collectives of its slowest rank.", "s",
              [series(f"max by (job) ({of('upipe_step_seconds')})", "{{job}}"),
               series(f"max by (job) ({of('upipe_step_own_seconds')})", "{{job}}, own", dashed=True)]),
    ]
    where = [
        lines("Where the time goes", "Seconds a second that streams spend on each kind of work, mean over the shown ranks. Streams run "
              "beside each other, so the sum may exceed 1.", "percentunit",
              [series(f"avg by (stage) ({of(rate('upipe_stage_seconds_total'))})", "{{stage}}")], stacked=True, colors=STAGE_COLORS),
        lines("Hidden share by job", "Exchanges and copies that passed while the rank computed, of all their time.", "percentunit",
              [series(hidden_share, "{{job}}")], high=1),
        lines("Bus bandwidth", "Bytes over seconds of each kind of collective, mean over the shown ranks; waiting for a slower peer "
              "counts as time.", "Bps",
              [series(f"sum by (operation) ({of(rate('upipe_comm_bytes_total'))}) / "
                      f"(sum by (operation) ({of(rate('upipe_comm_seconds_total'))}) > 0)", "{{operation}}")]),
        lines("Time in collectives", "Share of time, mean over the shown ranks.", "percentunit",
              [series(f"sum by (operation) ({of(rate('upipe_comm_seconds_total'))}) / scalar(count({SHOWN}))", "{{operation}}")],
              stacked=True),
        lines("Collectives per second", "Calls of each kind, mean over the shown ranks.", "ops",
              [series(f"sum by (operation) ({of(rate('upipe_comm_calls_total'))}) / scalar(count({SHOWN}))", "{{operation}}")]),
        lines("Data wait by rank", "Share of time in which a rank waited for tokens.", "percentunit",
              [series(of(rate("upipe_data_seconds_total")), RANK)]),
    ]
    skew = [
        lines("Straggler spread", "Own time (outside collectives) of the slowest rank over the median. 1 is even; far above it, everybody "
              "waits for one rank.", "short", [series(spread, "{{job}}")], thresholds=steps((None, GOOD), (1.5, WARN)), low=1),
        lines("Own seconds by rank", "Time of the last step outside collectives.", "s", [series(of("upipe_step_own_seconds"), RANK)]),
        table("Slowest ranks", "Of each job, by its last step.", {"job": "Job"},
              [("Rank", "none", 'max by (job) (upipe_job_slowest_rank{job=~"$job"})'), ("Spread", "short", f"max by (job) ({spread})"),
               ("Own time", "s", 'max by (job) (upipe_job_own_seconds_max{job=~"$job"})')], width=24, height=6),
    ]
    return dashboard("throughput", "Throughput", "How fast jobs train, and where their time goes.", places(),
                     [("Summary", summary), ("Speed", speed), ("Where time goes", where), ("Stragglers", skew)])


def job():
    def mine(expr):
        return of(expr, JOB)

    rank_0 = JOB.replace("}", ', rank="0"}')
    name = "rank {{rank}}"
    # Of an attempt that has not told a step yet it is 0.
    step, saved = '(upipe_job_step{job=~"$job"} > 0)', 'upipe_job_checkpoint_step{job=~"$job"}'
    age = 'time() - upipe_job_checkpoint_timestamp_seconds{job=~"$job"}'
    summary = [
        one("Step", "The last step that rank 0 reported.", "none", f"max({step})"),
        one("Ranks", "That train it now.", "none", 'max(upipe_job_ranks{job=~"$job"})'),
        one("Loss", "Of the last step, nats a token.", "none", f"max({of('upipe_loss', rank_0)})", decimals=4),
        one("Tokens per second", "All ranks together, in the last step.", "short", f"max({of('upipe_tokens_per_second', rank_0)})"),
        one("At risk", "Steps since the newest checkpoint: what a restart now would repeat.", "none", f"max({step} - {saved})"),
        one("Checkpoint age", "Since the newest checkpoint was committed.", "s", f"max({age})"),
    ]
    inside = [
        bars("Progress inside the step", "Layers of both passes that each rank has done in the step it is in.", "percentunit",
             mine("upipe_step_layers_done / upipe_step_layers"), name, high=1, width=12),
        lines("Ranks in each pass", "How many ranks are in which pass.", "none",
              [series(f"sum by (pass) ({mine('upipe_pass')})", "{{pass}}")],
              stacked=True),
        lines("In place", "Since the position (step, pass, layer, stage) of each rank last changed. It is ended as a stall when none "
              "moves.", "s", [series(mine("upipe_rank_in_place_seconds"), name)]),
        lines("Layers done", "In the step each rank is in.", "none", [series(mine("upipe_step_layers_done"), name),
              series(f"max({mine('upipe_step_layers')})", "of a step", dashed=True, color=PLAN_COLOR)]),
    ]
    learning = [
        lines("Loss by step", "Mean over the tokens of a step, and of held-out text where it is evaluated; nats a token.", "none",
              [series(of("upipe_loss", rank_0), "loss"), series(of("upipe_held_out_loss", rank_0), "held out", color="#d2601a")], low=None),
        lines("Gradient norm", "Of all gradients, before clipping.", "none", [series(of("upipe_grad_norm", rank_0), "norm")]),
        lines("Learning rate", "Used in the last step.", "sci", [series(of("upipe_learning_rate", rank_0), "learning rate")]),
        lines("Skipped steps", "Updates that were left out: a norm that is not finite, or no valid token.", "none",
              [series(f"max({of('increase(upipe_skipped_steps_total[$__rate_interval])', rank_0)})", "skipped")], points=True),
    ]
    steps_row = [
        lines("Step seconds by rank", "The whole step; dashed, outside collectives.", "s",
              [series(mine("upipe_step_seconds"), name), series(mine("upipe_step_own_seconds"), f"{name}, own", dashed=True)]),
        lines("Stage seconds", "Of the last step, mean over ranks.", "s",
              [series(f"avg by (stage) ({mine('upipe_step_stage_seconds')})", "{{stage}}")], stacked=True, colors=STAGE_COLORS),
    ]
    memory_row = [
        bars("Memory against its limit", "Peak of each rank; a full bar is its limit.", "percentunit",
             mine('upipe_memory_peak_bytes{pool="device"} / upipe_memory_limit_bytes{pool="device"}'), name, high=1,
             thresholds=NEAR_LIMIT, width=12),
        lines("Peak and plan", "Device memory of each rank; dashed, the largest planned peak.", "bytes",
              [series(mine('upipe_memory_peak_bytes{pool="device"}'), name),
               series(f"""max({mine('upipe_memory_planned_bytes{pool="device"}')})""", "planned, the largest", dashed=True,
                      color=PLAN_COLOR)]),
    ]
    safety = [
        lines("Steps and checkpoints", "The last step and the step of the newest checkpoint.", "none",
              [series(step, "step"), series(saved, "checkpoint", color=GOOD)]),
        lines("Checkpoints", "Seconds from the vote until the manifest is in its place.", "s",
              [series(f"max({mine('upipe_checkpoint_seconds')})", "seconds")]),
        lines("Checkpoint size", "Of the newest one, all ranks.", "bytes", [series(f"max({mine('upipe_checkpoint_bytes')})", "bytes")]),
        lines("Checkpoint problems", "Checkpoints that were not made or were passed over, as its workers counted them.", "none",
              [series(f"sum({mine('increase(upipe_checkpoint_problems_total[$__rate_interval])')})", "problems")], points=True),
        lines("Generations", "Ranks of each attempt; a new generation is a restart.", "none",
              [series(f"count by (generation) ({JOB})", "generation {{generation}}")], stacked=True, width=12),
        table("Where its ranks are", "Worker, slot and plan of every rank that runs now.",
              {"rank": "Rank", "worker": "Worker", "node": "Node", "slot": "Slot", "generation": "Generation", "plan": "Plan"},
              [("Step", "none", "max by (rank, worker, node, slot, generation, plan) ("
                f"{joined('upipe_step', 'rank, generation, plan', JOB)})")], width=12),
    ]
    return dashboard("job", "One job", "What a job does now, how it learns, what it would lose, and its restarts.",
                     [variable("job", "Job", "label_values(upipe_job_step, job)", many=False)],
                     [("Summary", summary), ("Inside the step", inside), ("Learning", learning), ("Steps", steps_row),
                      ("Memory", memory_row), ("Checkpoints and restarts", safety)])
