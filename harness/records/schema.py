"""The kinds of records, and the keys that are read of each kind.

A key stands beside the check of its value.  A reader refuses a record in which one does not fit.
"""

import sys
from collections.abc import Callable

from harness.cli.flags import DTYPES
from harness.cli.processes import PARALLEL
from harness.cli.workload import PRETRAINED, RANDOM

Predicate = Callable[[object], bool]

# what `run_records.environment_line` prints of where a record was made
ENVIRONMENT = {"gpu", "cpu", "torch", "triton", "transformers", "date", "commit"}


def is_number(value: object) -> bool:
    """Return True if it is finite, as a float too: JSON may hold an integer of 400 digits."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def is_positive(value: object) -> bool:
    return is_number(value) and value > 0


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def is_object(value: object) -> bool:
    return isinstance(value, dict)


def is_environment(value: object) -> bool:
    return is_object(value) and value.keys() >= ENVIRONMENT


def is_list_of(is_item: Predicate) -> Predicate:
    return lambda values: isinstance(values, list) and all(map(is_item, values))


def is_table_of(is_item: Predicate) -> Predicate:
    return lambda values: is_object(values) and all(map(is_item, values.values()))


def has_numbers(*names: str) -> Predicate:
    """Return a test for objects in which these names have numbers."""
    return lambda value: is_object(value) and all(is_number(value.get(name)) for name in names)


def is_scaling_row(value: object) -> bool:
    """Return True for a way at a size, measured or too large."""
    numbers = "median_ms", "p20_ms", "p80_ms", "tokens_per_second_per_gpu", "peak_memory_bytes"
    named = has_numbers("batch_size", "seq_len")(value) and is_text(value.get("way"))
    named = named and all(is_number(us) for key, us in value.items() if key.endswith("_us"))
    named = named and has_numbers("watts")(value.get("power") or {"watts": 0})
    return named and ("failure" in value or has_numbers(*numbers)(value))


of_category = has_numbers("us", "launches", "bytes", "flops")
of_ceilings = has_numbers("copy_gbs", "matmul_tflops")
of_timeline = has_numbers("step_ms", "idle_us", "host_us")
OBJECTS, TEXTS = is_list_of(is_object), is_list_of(is_text)
# what several kinds have: where the record was made, of which model, of which steps
MADE_FIELDS = {"environment": is_environment}
MODEL_FIELDS = MADE_FIELDS | dict.fromkeys(("model", "weights", "dtype"), is_text)
RUN_FIELDS = (
    MODEL_FIELDS | {"kernels": TEXTS} | dict.fromkeys(("batch_size", "seq_len"), is_positive)
)
STEP_FIELDS = RUN_FIELDS | {
    "data": is_text,
    "losses": lambda losses: is_list_of(is_number)(losses) and len(losses) > 0,
    **dict.fromkeys(("seconds", "tokens"), is_list_of(is_positive)),
    "warmup_steps": is_count,
    **dict.fromkeys(("steps", "lr", "median_seconds"), is_positive),
    **dict.fromkeys(("tokens_per_second", "peak_memory_bytes"), is_positive),
}
RATES = dict.fromkeys(("copy_gbs", "matmul_tflops"), is_positive)
BENCHMARK = MADE_FIELDS | RATES | {"dtype": is_text, "sections": OBJECTS, "absent": TEXTS}

KINDS: dict[str, dict[str, Predicate]] = {
    "benchmark": BENCHMARK,
    "durations": MADE_FIELDS | {"seconds": is_table_of(is_number)},
    "estimate": RUN_FIELDS | {"parameters": is_positive, "layers": is_count, "estimates": OBJECTS},
    "finetune": STEP_FIELDS
    | {
        "title": is_text,
        "weights": lambda words: words in (RANDOM, PRETRAINED),
        "dtype": lambda dtype: dtype in [*DTYPES],
        **dict.fromkeys(("seed", "validation_loss_after"), is_number),
    },
    "fp8_accuracy": RUN_FIELDS | {"study": is_text, "seeds": is_list_of(is_count), "runs": OBJECTS},
    "fp8_costs": MADE_FIELDS | {"copy_gbs": is_positive, "casts": OBJECTS, "products": OBJECTS},
    "frontier": RUN_FIELDS | {"parameters": is_positive, "rows": OBJECTS},
    "instructions": MADE_FIELDS | {"counts": OBJECTS},
    "judge": MADE_FIELDS | {"subject": is_text, "judged": is_table_of(OBJECTS), "absent": TEXTS},
    "ladder": RUN_FIELDS | {"copy_gbs": is_positive, "rungs": OBJECTS, "absent": TEXTS},
    "longest": RUN_FIELDS
    | {"stopped_by": is_text}
    | dict.fromkeys(("lengths", "peaks"), is_list_of(is_count)),
    "memory": RUN_FIELDS
    | {"peak_memory_bytes": is_positive, "parts": is_table_of(is_number), "largest": OBJECTS},
    "prediction": MADE_FIELDS
    | {"gpu": is_text, "sources": TEXTS, "ceilings": of_ceilings, "rows": OBJECTS, "absent": TEXTS},
    "profile": RUN_FIELDS
    | {
        **dict.fromkeys(("data", "device"), is_text),
        **dict.fromkeys(("parameters", "median_step_ms"), is_positive),
        "operations": is_list_of(lambda row: has_numbers("us")(row) and is_text(row.get("name"))),
        "categories": is_table_of(
            lambda part: of_category(part) and is_number(part.get("fp8_flops", 0.0))
        ),
        "step_ms": lambda ms: is_list_of(is_positive)(ms) and len(ms) > 0,
        "busy_us": is_number,
        "ceilings": lambda rates: of_ceilings(rates) and all(map(is_positive, rates.values())),
        "sizes": has_numbers("weights", "stream", "heads", "inner", "logits", "layers", "width"),
        "timeline": lambda times: times is None or of_timeline(times),
    },
    "published": {"sources": is_table_of(is_text), "rows": OBJECTS},
    "scaling": MODEL_FIELDS
    | {
        "parameters": is_positive,
        "world_size": is_count,
        "parallel": (None, *PARALLEL).__contains__,
        "absent": TEXTS,
        "rows": is_list_of(is_scaling_row),
    },
    "sft": STEP_FIELDS,
    "sweep": BENCHMARK,
    "text": MADE_FIELDS | {"script": is_text, "lines": TEXTS},
    "weight_values": RUN_FIELDS | {"rounds": OBJECTS},
}
# keys that only some records have, or only newer ones, of whichever kind
MAY_BE_MISSING = {
    **dict.fromkeys(("first_layers", "lora_rank", "trained_parameters"), is_count),
    **dict.fromkeys(("lora_alpha", "padding"), is_number),
    **dict.fromkeys(("lora_targets", "teacher"), is_text),
    "parallel": (None, *PARALLEL).__contains__,  # AUTO stands for one of them
    "profiled_steps": is_count,
    "data_seconds": is_list_of(is_number),
    "fp8_layers": lambda counts: is_list_of(is_count)(counts) and len(counts) == 2,
}


def keys_of(record: dict) -> dict[str, Predicate]:
    """Return the keys that a record has to have, by its kind and by what it has."""
    keys = {key: fits for key, fits in MAY_BE_MISSING.items() if key in record}
    with_lora = ("lora_alpha", "lora_targets") if "lora_rank" in record else ()
    return KINDS[record["kind"]] | keys | {key: MAY_BE_MISSING[key] for key in with_lora}
