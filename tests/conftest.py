import os

import hypothesis
import torch

hypothesis.settings.register_profile("gapless", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("gapless")

if not torch.cuda.is_available():
    # Before Triton is imported: on a CPU the kernels run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
