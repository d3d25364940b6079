"""Gathering and advancing the rows of a decode step: both implementations against a plain loop over the rows.

What a step should write is garbage before, what it should leave alone is compared as a whole afterwards.
"""

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import rows, rows_triton
from engine.kernels.rows import RowState, StepBuffers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLEMENTATIONS = [rows, rows_triton]
GARBAGE = -12345
NUM_ROWS, BLOCK_SIZE, TABLE_WIDTH = 12, 4, 9
SCRATCH = NUM_ROWS


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_state(positions, table_width=TABLE_WIDTH) -> RowState:
    """Rows at `positions`, with blocks, tokens, temperatures and seeds that are all different, and the scratch row."""
    size = len(positions) + 1
    row = torch.arange(size, device=DEVICE)
    return RowState(
        last_token_N=100 + row.int(), position_N=int32([*positions, -1]), temperature_N=(row % 3) / 2,
        seed_N=row + 2**40, block_tables_NB=torch.arange(size * table_width, device=DEVICE).int().view(size, -1))


def make_step(row_ids, new_blocks, table_width=TABLE_WIDTH) -> StepBuffers:
    """Outputs hold garbage; the block tables are a view of a wider buffer."""
    def garbage(dtype):
        return torch.full((len(row_ids),), GARBAGE, dtype=dtype, device=DEVICE)
    wide = torch.full((len(row_ids), table_width + 3), GARBAGE, dtype=torch.int32, device=DEVICE)
    return StepBuffers(
        int32(row_ids), int32(new_blocks), *(garbage(torch.int32) for _ in range(4)), garbage(torch.float32),
        garbage(torch.int64), wide[:, :table_width])


@dataclass
class Row:
    """A row as plain numbers: what the loop works on."""

    last_token: int
    position: int
    temperature: float
    seed: int
    table: list[int]

    def read(self, new_block: int, block_size: int) -> list:
        """Input id, position, slot, context length, temperature, seed, and the table up to the newest token."""
        if self.position < 0:
            return [0, 0, -1, 0, 0.0, 0, []]
        column, offset = divmod(self.position, block_size)
        if new_block >= 0:
            self.table[column] = new_block
        return [self.last_token, self.position, self.table[column] * block_size + offset, self.position + 1,
                self.temperature, self.seed, self.table[:column + 1]]

    def advance(self, token: int) -> None:
        if self.position >= 0:
            self.last_token, self.position = token, self.position + 1


def plain_rows(state: RowState) -> list[Row]:
    return [Row(*values) for values in zip(*(column.tolist() for column in vars(state).values()), strict=True)]


def plain_step(step: StepBuffers) -> list[list]:
    """What the step holds of each row, tables cut behind the newest token's block."""
    outputs = [getattr(step, field.name).tolist() for field in fields(StepBuffers)[2:]]
    read = [list(values) for values in zip(*outputs, strict=True)]
    for values in read:
        values[-1] = values[-1][:-(-values[3] // BLOCK_SIZE)]
    return read


def positions_up_to(last: int) -> st.SearchStrategy[list[int]]:
    """Of every row; -1 as often as any position."""
    return st.lists(st.just(-1) | st.integers(0, last), min_size=NUM_ROWS, max_size=NUM_ROWS)


participants = st.lists(st.integers(0, NUM_ROWS - 1), unique=True, max_size=NUM_ROWS)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@settings(max_examples=25, deadline=None)
@given(positions_up_to(TABLE_WIDTH * BLOCK_SIZE - 1), participants, st.integers(1, 3),
       st.randoms(use_true_random=False))
def test_a_step_reads_what_a_loop_over_its_rows_reads(kernels, positions, live, num_padding, random):
    row_ids = [*live, *[SCRATCH] * num_padding]
    random.shuffle(row_ids)
    new_blocks = [-1 if row == SCRATCH else random.choice([-1, 0, 500 + row]) for row in row_ids]
    state, step = make_state(positions), make_step(row_ids, new_blocks)
    plain = plain_rows(state)
    expected = [plain[row].read(block, BLOCK_SIZE) for row, block in zip(row_ids, new_blocks, strict=True)]
    kernels.read_rows(state, step, BLOCK_SIZE)
    assert plain_step(step) == expected
    assert plain_rows(state) == plain, "the rows change by their new blocks alone"
    behind = step.block_tables_RB.as_strided((len(row_ids), 3), (TABLE_WIDTH + 3, 1), TABLE_WIDTH)
    assert (behind == GARBAGE).all(), "nothing is written behind the table"
    for read, table_B in zip(expected, step.block_tables_RB, strict=True):
        assert read[3] or (table_B == GARBAGE).all(), "padding keeps its table"


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@settings(max_examples=25, deadline=None)
@given(positions_up_to(2**31 - 2), participants, st.integers(0, 3))
def test_live_rows_take_their_token_and_the_others_stay(kernels, positions, live, num_padding):
    row_ids = [*[SCRATCH] * num_padding, *live] or [SCRATCH]
    tokens = [1000 + index for index in range(len(row_ids))]
    state = make_state(positions)
    plain = plain_rows(state)
    for row, token in zip(row_ids, tokens, strict=True):
        plain[row].advance(token)
    kernels.advance_rows(state, int32(row_ids), int32(tokens))
    assert plain_rows(state) == plain


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@settings(max_examples=10, deadline=None)
@given(st.lists(participants, min_size=1, max_size=9), st.integers(0, 2**31))
def test_steps_in_a_row_follow_the_loop_across_block_boundaries(kernels, batches, first_block):
    state = make_state([BLOCK_SIZE - 3 + row for row in range(NUM_ROWS)])
    plain = plain_rows(state)
    for number, live in enumerate(batches):
        row_ids = [*live, SCRATCH]
        # A row gains a block when its newest token is a block's first.
        new_blocks = [(first_block + number * NUM_ROWS + row) % 2**28 if plain[row].position % BLOCK_SIZE == 0 else -1
                      for row in row_ids]
        step, tokens = make_step(row_ids, new_blocks), [number * 100 + row for row in row_ids]
        expected = [plain[row].read(block, BLOCK_SIZE) for row, block in zip(row_ids, new_blocks, strict=True)]
        kernels.read_rows(state, step, BLOCK_SIZE)
        kernels.advance_rows(state, step.rows_R, int32(tokens))
        assert plain_step(step) == expected
        for row, token in zip(row_ids, tokens, strict=True):
            plain[row].advance(token)
        assert plain_rows(state) == plain


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_a_table_wider_than_a_tile_is_copied_up_to_the_newest_block(kernels):
    width, columns = 700, [0, 255, 256, 511, 512, 699]
    state = make_state([BLOCK_SIZE * column + 1 for column in columns], width)
    new_blocks = [-1, 7, 8, -1, 9, -1]
    step = make_step(range(len(columns)), new_blocks, width)
    expected = state.block_tables_NB.clone()
    for row, (column, block) in enumerate(zip(columns, new_blocks, strict=True)):
        expected[row, column] = block if block >= 0 else expected[row, column]
    kernels.read_rows(state, step, BLOCK_SIZE)
    assert torch.equal(state.block_tables_NB, expected)
    for row, column in enumerate(columns):
        assert torch.equal(step.block_tables_RB[row, :column + 1], expected[row, :column + 1])


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_more_rows_than_a_program_takes_all_advance(kernels):
    num_rows = 600
    state, row_ids = make_state(range(num_rows)), [*reversed(range(num_rows)), num_rows, num_rows]
    kernels.advance_rows(state, int32(row_ids), int32(row_ids))
    assert state.last_token_N.tolist() == [*range(num_rows), 100 + num_rows]
    assert state.position_N.tolist() == [*range(1, num_rows + 1), -1]
