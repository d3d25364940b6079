"""Tables lose no step, row or replay, whatever the steps were."""

from hypothesis import given
from hypothesis import strategies as st

from engine.graph.decode_profile import load_profile
from engine.records import BucketRecord, EngineRecords, ParityRecord
from experiments.result import write_json
from experiments.tables import buckets, decode_batches, decode_profile, run_tables, steps_by_path
from run_records import make_startup, make_step


@st.composite
def steps(draw):
    """Prefills, replays of bucket 1 or 4, and eager decode steps, in any order."""
    records = []
    for number in range(draw(st.integers(0, 40))):
        way = draw(st.sampled_from(["prefill", "graph", "eager"]))
        if way == "prefill":
            records.append(make_step(number, "prefill"))
            continue
        live = draw(st.integers(1, 4))
        bucket = (1 if live == 1 else 4) if way == "graph" else None
        records.append(make_step(number, path=way, reason="captured" if bucket else "above_largest_bucket",
                                 num_requests=live, bucket=bucket, num_padded_rows=bucket - live if bucket else 0))
    return records


def decodes(records):
    return [step for step in records if step.phase == "decode"]


@given(steps())
def test_decode_batches_count_every_decode_step_once(records):
    rows = decode_batches(records)
    assert sum(row["num_steps"] for row in rows) == len(decodes(records))
    assert sum(row["num_padded_rows"] for row in rows) == sum(step.num_padded_rows for step in records)
    assert sum(row["num_steps"] * row["batch_size"] for row in rows) == sum(s.num_requests for s in decodes(records))
    assert [row["batch_size"] for row in rows] == sorted(row["batch_size"] for row in rows)


@given(steps())
def test_buckets_count_every_replay_once(records):
    rows = buckets(records, make_startup())
    replayed = [step for step in records if step.path == "graph"]
    assert [row["batch_size"] for row in rows] == [1, 4], "also those that were never replayed"
    assert sum(row["num_replays"] for row in rows) == len(replayed)
    assert sum(row["num_live_rows"] for row in rows) == sum(step.num_requests for step in replayed)
    assert sum(row["num_padded_rows"] for row in rows) == sum(step.num_padded_rows for step in replayed)


@given(steps().filter(decodes))
def test_a_runs_profile_is_what_the_tuner_reads(tmp_path_factory, records):
    startup = make_startup(buckets=(BucketRecord(1, 0.1, 0.2, 1024, 512, replay_ms=1.5),
                                    BucketRecord(4, 0.1, 0.2, None, None)))
    path = tmp_path_factory.mktemp("run") / "decode_batches.json"
    write_json(path, {"schema_version": 1, **decode_profile(records, startup)})
    profile = load_profile(str(path.parent))
    assert profile.steps_by_batch_size == {
        size: sum(step.num_requests == size for step in decodes(records))
        for size in sorted({step.num_requests for step in decodes(records)})}
    assert (profile.replay_ms_by_bucket, profile.bytes_by_bucket) == ({1: 1.5}, {1: 1536})


def test_a_step_time_is_the_median_of_what_steps_add():
    """With a commit that lags, a step is scheduled before the one before it ends."""
    records = [make_step(0, "prefill", start_s=0.0, end_s=1.0), make_step(1, start_s=0.5, end_s=1.5),
               make_step(2, start_s=1.0, end_s=1.75), make_step(3, start_s=2.0, end_s=4.0)]
    [row] = decode_batches(records)
    assert row == {"batch_size": 3, "path": "graph", "reason": "captured", "bucket": 4, "num_steps": 3,
                   "num_padded_rows": 3, "step_ms_p50": 500.0}


def test_a_batch_size_that_ran_in_two_ways_has_two_rows():
    records = [make_step(0), make_step(1, path="eager", reason="above_largest_bucket", bucket=None, num_padded_rows=0)]
    assert [(row["path"], row["num_padded_rows"]) for row in decode_batches(records)] == [("eager", 0), ("graph", 1)]


def test_tables_without_a_row_are_left_out():
    assert run_tables(EngineRecords(), make_startup(buckets=())) == {}
    parity = (ParityRecord(4, 3, 0.0, 0, True),)
    tables = run_tables(EngineRecords([make_step(0)]), make_startup(parity=parity, disabled_buckets=(4,)))
    assert tables.keys() == {"decode_batches", "buckets", "parity"}
    assert [row["is_disabled"] for row in tables["buckets"]] == [False, True]
    assert tables["parity"][0]["max_difference"] == 0.0


def test_steps_are_counted_by_path_and_reason():
    records = [make_step(0, "prefill"), make_step(1), make_step(2),
               make_step(3, path="eager", reason="above_largest_bucket")]
    assert steps_by_path(records) == {"graph: captured": 2, "eager: prefill": 1, "eager: above_largest_bucket": 1}
