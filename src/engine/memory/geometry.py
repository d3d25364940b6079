"""Sizes of a KV cache that follow from the model and the limits alone: what a block takes, and how many are of use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KVGeometry:
    """How a KV cache is cut. The last token of a request is never stored, since no token follows it."""

    block_size: int  # tokens a block
    bytes_per_token: int  # over all layers
    max_model_len: int
    max_num_seqs: int

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.bytes_per_token

    @property
    def table_width(self) -> int:
        """Most blocks that a request's block table names."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_useful_blocks(self) -> int:
        """Blocks beyond these could never be in use: max_num_seqs requests of max_model_len tokens."""
        return self.max_num_seqs * self.table_width

    @property
    def blocks_per_full_request(self) -> int:
        """Blocks of a request of max_model_len tokens."""
        return max(1, -(-(self.max_model_len - 1) // self.block_size))

    def num_full_requests(self, num_blocks: int) -> int:
        """Requests of max_model_len tokens that `num_blocks` hold at once."""
        return num_blocks // self.blocks_per_full_request

    def longest_fitting(self, num_bytes: int) -> int:
        """The largest max_model_len of which one request fits into `num_bytes`; 0 if not even a block does."""
        num_blocks = max(0, num_bytes) // self.block_bytes
        return num_blocks * self.block_size + 1 if num_blocks else 0
