"""When the KV cache is sized, and what every part of device memory costs."""
