"""A cache made through the C interface from Python: the few structs of kvpages.h that this takes."""

import ctypes
from ctypes import (POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64,
                    c_void_p)

from kvpages_view import Cache, Device, check

BF16, FULL_ATTENTION, FLASH_ATTENTION_NHD, OVERRIDE_NUM_BLOCKS = 4, 1, 1, 8
ALLOCATE = ctypes.CFUNCTYPE(c_int32, c_void_p, c_size_t, c_size_t, POINTER(c_void_p))
RELEASE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)


class Extensible(ctypes.Structure):
    """Zero but for its struct_size, as the _INIT macros have it."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class Spec(Extensible):
    _fields_ = [
        ("struct_size", c_size_t), ("kind", c_uint32), ("dtype", c_uint32),
        ("quant_mode", c_uint32), ("flags", c_uint32), ("block_size", c_uint64),
        ("num_kv_heads", c_uint64), ("head_size", c_uint64), ("head_size_v", c_uint64),
        ("page_size_padded_bytes", c_uint64), ("sliding_window", c_uint64),
        ("attention_chunk_size", c_uint64), ("tq_slot_bytes", c_uint64), ("sink_len", c_uint64),
        ("rswa_window", c_uint64), ("alignment_bytes", c_uint64), ("compress_ratio", c_uint64),
        ("cache_dtype", c_char_p), ("model_version", c_char_p), ("state_dtypes", c_void_p),
        ("num_state_dtypes", c_size_t), ("state_ndims", c_void_p), ("num_state_shapes", c_size_t),
        ("state_dims", c_void_p), ("num_state_dims", c_size_t), ("state_kind", c_uint32),
        ("state_cache_mode", c_uint32), ("num_speculative_blocks", c_uint64),
    ]


class Layer(Extensible):
    _fields_ = [("struct_size", c_size_t), ("name", c_char_p), ("spec", POINTER(Spec)),
                ("backend", c_void_p), ("shares_with", c_char_p), ("num_query_heads", c_uint32),
                ("reserved0", c_uint32)]


class PlanConfig(Extensible):
    _fields_ = [
        ("struct_size", c_size_t), ("policy", c_uint32), ("flags", c_uint32),
        ("max_model_len", c_uint64), ("context_parallel_size", c_uint64),
        ("max_tokens_in_flight", c_uint64), ("max_encoder_tokens", c_uint64),
        ("num_blocks_override", c_uint64), ("reserved_blocks", c_uint64),
        ("state_cache_mode", c_uint32), ("reserved0", c_uint32), ("typical_len", c_uint64),
        ("choose_block_sizes", c_uint32), ("reserved1", c_uint32),
    ]


class Worker(ctypes.Structure):
    _fields_ = [("model", c_void_p), ("memory_bytes", c_int64)]


class MemoryCallbacks(Extensible):
    _fields_ = [("struct_size", c_size_t), ("user", c_void_p), ("allocate", ALLOCATE),
                ("release", RELEASE), ("is_zeroed", c_uint32), ("reserved0", c_uint32),
                ("device", Device)]


class CacheConfig(Extensible):
    _fields_ = [("struct_size", c_size_t), ("worker", c_size_t), ("memory", c_void_p),
                ("num_blocks", c_uint64), ("flags", c_uint32), ("reserved0", c_uint32)]


class Allocator:
    """Memory of Python's, and which of it is in use."""

    def __init__(self):
        self.live = {}
        self.callbacks = MemoryCallbacks(allocate=ALLOCATE(self.allocate),
                                         release=RELEASE(self.release))

    def allocate(self, _user, size, alignment, out):
        block = ctypes.create_string_buffer(size + alignment)
        address = -(-ctypes.addressof(block) // alignment) * alignment
        self.live[address] = block
        out[0] = address
        return 0

    def release(self, _user, data, _size):
        del self.live[data]


def make_cache(library, allocator, num_blocks):
    """One layer of bf16 with 16 tokens a block, 2 heads of 8 elements: FlashAttention's pages."""

    def call(function, *arguments):
        check(library, getattr(library, function)(*arguments))

    model, backend, plan, memory, cache = (c_void_p() for _ in range(5))
    spec = Spec(kind=FULL_ATTENTION, dtype=BF16, block_size=16, num_kv_heads=2, head_size=8)
    try:
        call("kvpages_backend_create_preset", FLASH_ATTENTION_NHD, byref(backend))
        call("kvpages_model_create", byref(model))
        layer = Layer(name=b"layer", spec=ctypes.pointer(spec), backend=backend, num_query_heads=2)
        call("kvpages_model_add_layer", model, byref(layer))
        config = PlanConfig(flags=OVERRIDE_NUM_BLOCKS, num_blocks_override=num_blocks,
                            max_model_len=1)
        call("kvpages_plan_create", byref(config), byref(Worker(model, 0)), c_size_t(1),
             byref(plan), None)
        call("kvpages_memory_create_external", byref(allocator.callbacks), byref(memory))
        call("kvpages_cache_create", plan, byref(CacheConfig(memory=memory)), byref(cache), None)
    finally:
        library.kvpages_memory_destroy(memory)
        library.kvpages_plan_destroy(plan)
        library.kvpages_model_destroy(model)
        library.kvpages_backend_destroy(backend)
    return Cache(library, cache)
