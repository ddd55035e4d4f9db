"""The code of layers that Numba compiles. A cache is stale by the date of its file: none is split.

Work is dealt out item by item to the threads of a team. Tensors are flat arrays of unknown length:
an index is one sum, and as an unsigned number it needs no test for counting from the end.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from worker.cpu_kernels.team import floats, integers, num_threads, thread_number

_LOG2_E = np.float32(1.4426950408889634)
_LOWEST, _HIGHEST = np.float32(-126.0), np.float32(127.0)
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)
# 2^r for 0 <= r < 1, fitted to the least relative error: 2e-9, before it is rounded.
_C6 = np.float32(2.17022418e-4)
_C5 = np.float32(1.24396919e-3)
_C4 = np.float32(9.67884064e-3)
_C3 = np.float32(5.54833412e-2)
_C2 = np.float32(2.4022983e-1)
_C1 = np.float32(6.93147004e-1)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_LEAST = np.float32(-np.inf)
_U = np.uint64


@njit
def exponentials(x, at, count, bits, powers):
    """Replace x[at + i] by e to its power for i < count, within what normal numbers can hold.

    `bits` int32 [count] is room to work in, `powers` the same memory as float32.
    e^x = 2^floor(y) * 2^r, y = x log2(e), r = y - floor(y). Example: x = 1 -> y = 1.4427,
    2 * 2^0.4427 = 2.7183.
    """
    for index in range(count):
        i = _U(index)
        y = x[_U(at) + i] * _LOG2_E
        y = _LOWEST if y < _LOWEST else y
        y = _HIGHEST if y > _HIGHEST else y
        whole = np.float32(math.floor(y))
        r = y - whole
        bits[i] = (np.int32(whole) + _BIAS) << _MANTISSA_BITS
        value = _C5 + r * _C6
        value = _C4 + r * value
        value = _C3 + r * value
        value = _C2 + r * value
        value = _C1 + r * value
        x[_U(at) + i] = _ONE + r * value
    for index in range(count):
        i = _U(index)
        x[_U(at) + i] *= powers[i]


@njit
def rotate(source, at, cosine, sine, angle, half, scale, target, to):
    """target[to :] = `scale` times source[at : at + 2 half] rotated; see layers.rotate."""
    for index in range(half):
        j = _U(index)
        c, s = cosine[_U(angle) + j] * scale, sine[_U(angle) + j] * scale
        x, y = source[_U(at) + j], source[_U(at + half) + j]
        target[_U(to) + j] = x * c - y * s
        target[_U(to + half) + j] = y * c + x * s


@njit
def store(qkv, key, value, cosine, sine, angle, head_dim, pages, to, values):
    """Put one head's key, rotated, at pages[to :], and its value `values` numbers behind."""
    rotate(qkv, key, cosine, sine, angle, head_dim // 2, _ONE, pages, to)
    for index in range(head_dim):
        pages[_U(to + values + index)] = qkv[_U(value + index)]


@njit
def score(queries, at, pages, keys, count, head_dim, scores, to):
    """scores[to + t] = queries[at :] . key t; the largest, and 0 or, if any is not finite, NaN."""
    largest, odd = _LEAST, _ZERO
    for token in range(count):
        key = _U(keys + token * head_dim)
        product = _ZERO
        for index in range(head_dim):
            j = _U(index)
            product += queries[_U(at) + j] * pages[key + j]
        scores[_U(to + token)] = product
        odd += product * _ZERO
        largest = product if product > largest else largest
    return largest, odd


@njit
def weigh(scores, at, count, largest, bits, powers):
    """Replace scores[at :] by e^(score - largest); their sum."""
    for index in range(count):
        scores[_U(at) + _U(index)] -= largest
    exponentials(scores, at, count, bits, powers)
    weight = _ZERO
    for index in range(count):
        weight += scores[_U(at) + _U(index)]
    return weight


@njit
def add_values(weights, at, pages, values, count, head_dim, totals, to):
    """totals[to :] += weights[at + t] * value t, for all t < count."""
    for token in range(count):
        weight, value = weights[_U(at + token)], _U(values + token * head_dim)
        for index in range(head_dim):
            j = _U(index)
            totals[_U(to) + j] += weight * pages[value + j]


@njit
def scale(source, at, factor, count, target, to):
    """target[to :] = source[at : at + count] * factor."""
    for index in range(count):
        target[_U(to) + _U(index)] = source[_U(at) + _U(index)] * factor


def write(words):
    """Rotate and store the keys and values of rows; an item is a row. See attention.write."""
    w = carray(words, (16,))
    rows, heads, kv_heads, block_size, head_dim = w[0], w[1], w[2], w[3], w[4]
    table_stride, block_stride, layer, values = w[5], w[6], w[7], w[8]
    qkv, cosine, sine, pages = floats(w[9]), floats(w[10]), floats(w[11]), floats(w[12])
    tables, table_rows, positions = integers(w[13]), integers(w[14]), integers(w[15])
    half = head_dim // 2
    for row in range(thread_number(), rows, num_threads()):
        position = positions[row]
        block = tables[table_rows[row] * table_stride + position // block_size]
        for kv_head in range(kv_heads):
            key = (row * (heads + 2 * kv_heads) + heads + kv_head) * head_dim
            token = kv_head * block_size + position % block_size
            to = block * block_stride + layer + token * head_dim
            value = key + kv_heads * head_dim
            store(qkv, key, value, cosine, sine, row * half, head_dim, pages, to, values)


def attend(words):
    """One query a row and head over the pages of what it sees; see attention.attend.

    An item is a row and a share of its KV heads, which are read together, page by page: what they
    have in a block lies side by side. Softmax takes one pass: what has been summed is scaled down
    whenever a larger score is met.
    """
    w = carray(words, (21,))
    rows, heads, kv_heads, block_size, head_dim = w[0], w[1], w[2], w[3], w[4]
    table_stride, block_stride, layer, values = w[5], w[6], w[7], w[8]
    qkv, cosine, sine, pages = floats(w[9]), floats(w[10]), floats(w[11]), floats(w[12])
    tables, table_rows, positions = integers(w[13]), integers(w[14]), integers(w[15])
    lengths, output, rotates, writes, shares = integers(w[16]), floats(w[17]), w[18], w[19], w[20]
    half, group, together = head_dim // 2, heads // kv_heads, kv_heads // shares
    width = heads + 2 * kv_heads if rotates else heads
    count = together * group
    queries = np.empty(count * head_dim, np.float32)
    totals = np.empty(count * head_dim, np.float32)
    scores = np.empty(count * block_size, np.float32)
    largest, weights = np.empty(count, np.float32), np.empty(count, np.float32)
    bits = np.empty(block_size, np.int32)
    powers = bits.view(np.float32)
    root = np.float32(1.0 / math.sqrt(head_dim))
    for item in range(thread_number(), rows * shares, num_threads()):
        row, first = item // shares, item % shares * together
        table, length, position = table_rows[row] * table_stride, lengths[row], positions[row]
        if writes:
            block = tables[table + position // block_size]
            for kv_head in range(first, first + together):
                key = (row * width + heads + kv_head) * head_dim
                token = kv_head * block_size + position % block_size
                to = block * block_stride + layer + token * head_dim
                value = key + kv_heads * head_dim
                store(qkv, key, value, cosine, sine, row * half, head_dim, pages, to, values)
        for head in range(count):
            at = (row * width + first * group + head) * head_dim
            if rotates:
                rotate(qkv, at, cosine, sine, row * half, half, root, queries, head * head_dim)
            else:
                scale(qkv, at, root, head_dim, queries, head * head_dim)
            largest[head], weights[head] = _LEAST, _ZERO
        totals[:] = _ZERO
        for start in range(0, length, block_size):
            tokens = min(block_size, length - start)
            at = tables[table + start // block_size] * block_stride + layer
            for head in range(count):
                keys = at + (first + head // group) * block_size * head_dim
                mine, own = head * head_dim, head * block_size
                top, odd = score(queries, mine, pages, keys, tokens, head_dim, scores, own)
                if top > largest[head]:
                    factor = np.float32(math.exp(largest[head] - top))
                    weights[head] *= factor
                    scale(totals, mine, factor, head_dim, totals, mine)
                    largest[head] = top
                weights[head] += odd + weigh(scores, own, tokens, largest[head], bits, powers)
            for head in range(count):
                seen = at + (first + head // group) * block_size * head_dim + values
                mine, own = head * head_dim, head * block_size
                add_values(scores, own, pages, seen, tokens, head_dim, totals, mine)
        for head in range(count):
            share = _ONE / weights[head] if length > 0 else _ZERO
            to = (row * heads + first * group + head) * head_dim
            scale(totals, head * head_dim, share, head_dim, output, to)


@njit
def inverse_rms(x, at, count, eps):
    """1 / sqrt(mean(x^2) + eps) of x[at : at + count]."""
    squares = _ZERO
    for index in range(count):
        value = x[_U(at) + _U(index)]
        squares += value * value
    return np.float32(1.0 / math.sqrt(squares / np.float32(count) + eps))


@njit
def norm_row(x, weight, at, count, eps, normed):
    """normed = weight * x / rms(x) of x[at : at + count]."""
    factor = inverse_rms(x, at, count, eps)
    for index in range(count):
        k = _U(at) + _U(index)
        normed[k] = weight[_U(index)] * (x[k] * factor)


def norm(words):
    """An item is a row. See pointwise.norm."""
    w = carray(words, (6,))
    rows, size, eps = w[0], w[1], np.float32(w.view(np.float64)[2])
    x, weight, normed = floats(w[3]), floats(w[4]), floats(w[5])
    for row in range(thread_number(), rows, num_threads()):
        norm_row(x, weight, row * size, size, eps, normed)


def residual_norm(words):
    """An item is a row. See pointwise.residual_norm."""
    w = carray(words, (9,))
    rows, size, eps = w[0], w[1], np.float32(w.view(np.float64)[2])
    hidden, branch, summed, normed = floats(w[3]), floats(w[4]), floats(w[7]), floats(w[8])
    branch_weight, next_weight = floats(w[5]), floats(w[6])
    for row in range(thread_number(), rows, num_threads()):
        at = row * size
        norm_row(branch, branch_weight, at, size, eps, summed)
        for index in range(size):
            k = _U(at) + _U(index)
            summed[k] += hidden[k]
        norm_row(summed, next_weight, at, size, eps, normed)
