"""The Hugging Face Trainer on several nodes. What a program owes mgpu are three habits, marked (1) to (3) below.

It runs without mgpu as well: `python hf_trainer.py` saves nothing and trains to the end.
"""

import argparse
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

CHECKPOINTS = os.environ.get("MGPU_CHECKPOINT_DIR")  # where `step-<n>` folders go
RESUME = os.environ.get("MGPU_RESUME_DIR")  # a checkpoint of ours, of all nodes, that mgpu has fetched and verified
TEXT = Path(__file__).read_bytes() * 4
LENGTH = 16


class Bytes(torch.utils.data.Dataset):
    """A model's own source, byte by byte."""

    def __len__(self) -> int:
        return len(TEXT) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor(list(TEXT[index * LENGTH : (index + 1) * LENGTH]))
        return {"input_ids": tokens, "labels": tokens}


class Habits(TrainerCallback):
    """What the Trainer does not know of mgpu."""

    def __init__(self) -> None:
        # (3) SIGTERM means: the machine is about to go, or somebody has said stop. Save after this step, then leave.
        self.asked = False
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, *_: Any) -> None:
        self.asked = True

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        flag = torch.tensor(float(self.asked), device=args.device)
        if distributed.is_initialized():
            distributed.all_reduce(flag)  # all processes leave at the same step
        if flag:
            control.should_save = CHECKPOINTS is not None
            control.should_training_stop = True
        if state.is_world_process_zero and (
            state.global_step % args.save_steps == 0 or state.global_step == args.max_steps
        ):
            print(f"step {state.global_step}: done", flush=True)

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        # (1) The Trainer has written into a folder of its own; the final name says that it is whole. With
        # `checkpoint.writers: all` each node has a part, with the random states of its own processes.
        if distributed.is_initialized():
            distributed.barrier()
        if state.is_local_process_zero and CHECKPOINTS is not None:
            final = Path(CHECKPOINTS, f"step-{state.global_step}")
            Path(args.output_dir, f"checkpoint-{state.global_step}").rename(final)
        if distributed.is_initialized():
            distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    every = int(os.environ.get("MGPU_CHECKPOINT_EVERY_STEPS", "100"))  # checkpoint.every_steps of the run file
    parser.add_argument("--save-every", type=int, default=every)
    options = parser.parse_args()

    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    args = TrainingArguments(
        # on the same disk as the checkpoints: a rename is all at once there
        output_dir=str(Path(CHECKPOINTS, ".trainer")) if CHECKPOINTS else tempfile.mkdtemp(),
        max_steps=options.steps,
        save_strategy="steps" if CHECKPOINTS else "no",
        save_steps=options.save_every,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="gloo" if "RANK" in os.environ and not torch.cuda.is_available() else None,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=Bytes(), callbacks=[Habits()])

    # (2) Go on from the checkpoint that mgpu gives, if it gives one.
    if RESUME is not None and args.process_index == 0:
        state = json.loads(Path(RESUME, "trainer_state.json").read_text())
        print(f"goes on from step {state['global_step']}", flush=True)
    trainer.train(resume_from_checkpoint=RESUME)


if __name__ == "__main__":
    main()
