"""gapless: fine-tune large language models at the speed of the matmuls."""
