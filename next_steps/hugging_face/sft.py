"""TRL's SFTTrainer with the kernels: fine-tune on a jsonl file, in full or with LoRA.

    python -m next_steps.hugging_face.sft --data FILE.jsonl                     # all kernels
    python -m next_steps.hugging_face.sft --data FILE.jsonl --kernels none      # as TRL ships
    python -m next_steps.hugging_face.sft --data FILE.jsonl --opponent liger    # TRL's own switch

`train_with_trl` is the part to copy: docs/trainer.md says why each of its settings is there.
"""

import importlib.util
import statistics
from dataclasses import replace
from datetime import date
from itertools import pairwise

from harness.cli import command_line
from harness.cli.command_line import UserError
from harness.cli.flags import OF_FINETUNING, OF_TRAINING, WARMUP_STEPS, FlagParser, of_kernels, row
from harness.cli.output_files import check_outputs
from harness.cli.tables import not_shown, title
from harness.cli.workload import Workload, kernels_in_words, model_line
from harness.profiling.kernel_facts import KERNELS, LOSS_KERNELS

TRAINING = "--model", "--random-init", "--batch-size", "--seq-len", "--seed", "--dtype"
TRAINING += "--accumulate", "--lora-rank", "--lora-alpha", "--lora-targets", "--json"
TRAINING += ("--deterministic",)
FLAGS = {flag: OF_TRAINING[flag] for flag in TRAINING}
FLAGS |= {flag: OF_FINETUNING[flag] for flag in ("--steps", "--lr")}
FLAGS["--kernels"] = of_kernels(KERNELS, default="all")["--kernels"]
FLAGS["--data"] = row(
    "jsonl with 'prompt' and 'completion', or 'messages'", required=True, metavar="FILE.jsonl"
)
FLAGS["--opponent"] = row("Liger-Kernel's layers, by use_liger_kernel=True", choices=["liger"])


def train_with_trl(workload: Workload):
    """Fine-tune as the workload says; return the trainer, whose model is trained."""
    from transformers import Trainer
    from trl import SFTConfig, SFTTrainer

    from harness.cli.device import HAS_GPU
    from harness.data.dataset import load_tokenizer
    from harness.model.adapters import peft_config
    from harness.model.loading import load_model
    from harness.steps import stepping
    from next_steps.lessons.adamw_optimizer import TritonAdamW
    from next_steps.patches.apply_kernels import apply_kernels, model_kernels

    class ModelLossTrainer(SFTTrainer):
        """With the loss that the model computes; SFTTrainer never asks the model for it."""

        def compute_loss(self, *args, **kwargs):
            return Trainer.compute_loss(self, *args, **kwargs)

    tokenizer = load_tokenizer(workload)
    examples = read_examples(workload, tokenizer)
    config = SFTConfig(
        bf16=False,  # the model has its dtype; under autocast no fused layer runs
        gradient_checkpointing=False,  # nor with this
        max_length=workload.seq_len,
        per_device_train_batch_size=workload.batch_size,
        gradient_accumulation_steps=workload.micro_batches,
        learning_rate=workload.lr,
        max_steps=workload.steps,
        seed=workload.seed,
        use_liger_kernel=workload.opponent == "liger",
        use_cpu=not HAS_GPU,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        include_num_input_tokens_seen="non_padding",  # the log then has tokens and seconds
    )
    model = apply_kernels(load_model(workload), model_kernels(workload.kernels))
    if workload.lora_rank is not None:  # beside adapters in fp32, peft's default, it does not run
        from peft import get_peft_model

        model = get_peft_model(model, peft_config(workload), autocast_adapter_dtype=False)
    optimizer = None
    if "adamw" in workload.kernels:
        options = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        optimizer = TritonAdamW(stepping.trained(model), **options)
    trainer_class = ModelLossTrainer if {*LOSS_KERNELS} & {*workload.kernels} else SFTTrainer
    trainer = trainer_class(
        model,
        config,
        train_dataset=examples,
        processing_class=tokenizer or byte_tokenizer(),
        optimizers=(optimizer, None),
    )
    trainer.train()
    return trainer


def read_examples(workload: Workload, tokenizer):
    """Return the examples of a jsonl file as a `datasets.Dataset` of input_ids and labels.

    Raises:
        UserError: the file cannot be read, or its examples are not for this tokenizer and model.
    """
    from datasets import Dataset

    from harness.data.dataset import load_examples, require_vocabulary
    from harness.data.samples import Encoder
    from harness.model.config_file import load_config

    config = load_config(workload)
    encode = Encoder.of(tokenizer, config, date.today())
    examples, note = load_examples(workload, encode)
    require_vocabulary(config, examples)
    print(f"Data: {workload.data}: {len(examples):,} examples{note}, tokens: {encode.in_words()}")
    ids, labels = zip(*examples)
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def byte_tokenizer():
    """Return a tokenizer for a model without one: UTF-8 bytes are the tokens, 256 is the end."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    ids = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<end>": 256}
    model = models.BPE(ids, [], byte_fallback=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), eos_token="<end>", pad_token="<end>"
    )


def report_run(trainer, workload: Workload) -> dict:
    """Print a result block and return the record, from the trainer's log: an entry ends a step."""
    from harness.model.architecture import ModelFacts
    from harness.records.run_records import environment
    from harness.records.spread import timed
    from harness.steps.timing import peak_memory_bytes

    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    record = {"kind": "sft", "environment": environment()}
    record |= workload.as_record() | ModelFacts(trainer.model.config, workload).counts()
    record["losses"] = losses = [entry["loss"] for entry in log]
    for name, key in (("seconds", "train_runtime"), ("tokens", "num_input_tokens_seen")):
        record[name] = [after - before for before, after in pairwise([0, *(e[key] for e in log)])]
    record["warmup_steps"] = WARMUP_STEPS if len(log) > WARMUP_STEPS else 0
    seconds = timed(record)
    record["median_seconds"] = statistics.median(seconds)
    record["tokens_per_second"] = sum(timed(record, "tokens")) / sum(seconds)
    record["peak_memory_bytes"] = peak_memory_bytes()
    print(title("SFTTrainer Results"))
    print(f"{model_line(record)}\nKernels: {kernels_in_words(record)}")
    if record["environment"]["gpu"] is None:
        print(not_shown("speeds are"))
    else:
        print(f"Median time per step: {record['median_seconds']:.3f} s")
        print(f"Average throughput: {record['tokens_per_second']:,.0f} tokens/sec")
        print(f"Peak memory: {record['peak_memory_bytes'] / 1e9:.1f} GB")
    print(f"Loss: {losses[0]:.4f} in step 1, {losses[-1]:.4f} in step {len(losses)}")
    return record


def main() -> None:
    args = FlagParser(__doc__, FLAGS).parse_args()
    check_outputs(args)
    if not args.data.endswith(".jsonl"):
        raise UserError(f"--data {args.data}: expected a .jsonl file")
    for package, flag in {"trl": True, "liger_kernel": args.opponent}.items():
        if flag and importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed: pip install {package.replace('_', '-')}")
    from harness.cli.device import HAS_GPU  # after the flags: to import PyTorch takes seconds
    from harness.records.run_records import write_record

    workload = Workload.from_flags(args, HAS_GPU)
    if workload.opponent:
        if not HAS_GPU:
            raise UserError("--opponent liger needs a CUDA GPU and none was found")
        workload = replace(workload, kernels=())
    write_record(args.json, report_run(train_with_trl(workload), workload))


if __name__ == "__main__":
    command_line.run_main(main)
