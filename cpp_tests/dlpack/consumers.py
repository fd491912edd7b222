"""NumPy, PyTorch and TVM read and write views of kvpages through DLPack: scripts/test dlpack.

usage: consumers.py LIBKVPAGES PRODUCER CONSUMER...

Consumers are numpy, torch and tvm_ffi; tests of those that are not named are skipped. What a
consumer refuses is tested too, since docs/dlpack.md says it.
"""

import ctypes
import gc
import importlib
import sys
import threading
import unittest
from ctypes import c_bool, c_char_p, c_size_t, c_uint32, c_uint64, c_void_p

from abi import Allocator, make_cache
from kvpages_view import UNVERSIONED, VERSIONED, Capsules, View, load

numpy, torch, tvm_ffi = (importlib.import_module(name) if name in sys.argv[3:] else None
                         for name in ("numpy", "torch", "tvm_ffi"))

# Every view of the producer's cache, and the bytes of its elements.
VIEWS = [("f32", 0, 4), ("f16", 0, 2), ("bf16", 0, 2), ("u8", 0, 1), ("e4m3fn", 0, 1),
         ("e5m2", 0, 1), ("e2m1x2", 0, 1), ("latent", 0, 2), ("states", 0, 4), ("states", 1, 2)]
NUM_BLOCKS = 12


class Producer:
    """The engine in C++, which makes caches, and writes and reads through its own views."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        for name, result, *arguments in [
            ("last_error", c_char_p),
            ("live_allocations", c_uint64),
            ("create", c_void_p, c_uint64),
            ("destroy", None, c_void_p),
            ("export", c_void_p, c_void_p, c_char_p, c_size_t, c_bool),
            ("export_unversioned", c_void_p, c_void_p, c_char_p, c_size_t),
            ("write", c_size_t, c_void_p, c_char_p, c_size_t, c_uint32),
            ("read", c_size_t, c_void_p, c_char_p, c_size_t, c_void_p),
            ("handle", c_void_p, c_void_p),
        ]:
            function = getattr(self.library, "producer_" + name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


class Borrowed:
    """The producer's cache for kvpages_view.View, which does not destroy it."""

    def __init__(self, handle):
        self.library, self.handle = kvpages, handle


class FromCpp:
    """A tensor that C++ exported, for a consumer."""

    def __init__(self, cache, layer, state=0, read_only=False):
        self.arguments = (cache, layer.encode(), state, read_only)
        self.capsules = Capsules()

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, max_version=None, **_):
        if max_version is None:
            return self.capsules.new(producer.export_unversioned(*self.arguments[:3]), UNVERSIONED,
                                     kvpages.kvpages_dlpack_destroy_unversioned)
        return self.capsules.new(producer.export(*self.arguments), VERSIONED,
                                 kvpages.kvpages_dlpack_destroy)


def written(count, itemsize, seed):
    """The bytes that producer_write() leaves, as they are in the order of a view's indices."""
    return bytes((seed + element * 7 + byte * 3) % 251
                 for element in range(count) for byte in range(itemsize))


class WithProducer(unittest.TestCase):
    def setUp(self):
        self.assertEqual(producer.live_allocations(), 0)
        self.cache = producer.create(NUM_BLOCKS)
        self.assertIsNotNone(self.cache, producer.last_error())

    def tearDown(self):
        producer.destroy(self.cache)
        gc.collect()
        self.assertEqual(producer.live_allocations(), 0, "memory was not given back")

    def views(self, layer, state=0, read_only=False):
        """The view as the C interface exports it to Python, and as C++ does."""
        yield View(Borrowed(producer.handle(self.cache)), layer, state, read_only)
        yield FromCpp(self.cache, layer, state, read_only)

    def read(self, layer, state, size):
        data = (ctypes.c_ubyte * size)()
        self.assertEqual(producer.read(self.cache, layer.encode(), state, data), size)
        return bytes(data)

    def check(self, consumer, layer, state, itemsize, seed):
        """What C++ wrote is what the consumer reads, and the other way round."""
        producer.write(self.cache, layer.encode(), state, seed)
        for view in self.views(layer, state):
            array = consumer.take(view)
            data = consumer.bytes(array)
            count = len(data) // itemsize
            self.assertGreater(count, 0)
            self.assertEqual(data, written(count, itemsize, seed))
            turned = bytes(255 - byte for byte in data)
            consumer.write(array, turned)
            self.assertEqual(self.read(layer, state, len(data)), turned)
            consumer.write(array, data)


class NumPyConsumer:
    """numpy.from_dlpack()."""

    def take(self, view):
        return numpy.from_dlpack(view)

    def bytes(self, array):
        return numpy.ascontiguousarray(array).tobytes()

    def write(self, array, data):
        array[...] = numpy.frombuffer(data, array.dtype).reshape(array.shape)


class TorchConsumer:
    """torch.from_dlpack(). Bytes go as integers of the same size, of which any can be copied."""

    def take(self, view):
        return torch.from_dlpack(view)

    def integers(self, tensor):
        sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        return tensor.view(sizes[tensor.element_size()])

    def bytes(self, tensor):
        return bytes(self.integers(tensor).contiguous().flatten().view(torch.uint8).tolist())

    def write(self, tensor, data):
        integers = self.integers(tensor)
        given = torch.frombuffer(bytearray(data), dtype=integers.dtype)
        integers.copy_(given.reshape(integers.shape))


@unittest.skipUnless(numpy, "without NumPy")
class NumPy(WithProducer):
    def test_reads_and_writes_views_in_place(self):
        for layer, state, itemsize in VIEWS:
            if layer in ("f32", "f16", "u8") or (layer, state) == ("states", 0):
                with self.subTest(layer=layer, state=state):
                    self.check(NumPyConsumer(), layer, state, itemsize, 5)

    def test_has_the_views_shape_and_strides(self):
        for view in self.views("f32"):
            array = numpy.from_dlpack(view)
            self.assertEqual(array.dtype, numpy.float32)
            self.assertEqual(array.shape, (NUM_BLOCKS, 2, 4, 12))
            # Tokens outside heads, and pages as far apart as the pool of all layers has them.
            self.assertEqual(array.strides[1:], (12 * 4, 2 * 12 * 4, 4))
            self.assertGreaterEqual(array.strides[0], 4 * 2 * 12 * 4)
            self.assertFalse(array.flags.owndata)
            self.assertTrue(array.flags.writeable)

    def test_refuses_types_that_it_has_not(self):
        for layer in ("bf16", "e4m3fn", "e5m2", "e2m1x2", "latent"):
            for view in self.views(layer):
                with self.subTest(layer=layer), self.assertRaisesRegex(
                        (RuntimeError, BufferError), "Unsupported"):
                    numpy.from_dlpack(view)

    def test_keeps_read_only_views_read_only(self):
        for view in self.views("f32", read_only=True):
            array = numpy.from_dlpack(view)
            self.assertFalse(array.flags.writeable)
            with self.assertRaises(ValueError):
                array[...] = 0

    def test_keeps_the_memory_when_the_cache_is_gone(self):
        producer.write(self.cache, b"f32", 0, 9)
        arrays = [numpy.from_dlpack(view) for view in self.views("f32")]
        arrays.append(arrays[0][1:, :, 2])  # a view of NumPy's own
        live = producer.live_allocations()
        producer.destroy(self.cache)
        self.cache = None
        gc.collect()
        self.assertEqual(producer.live_allocations(), live)
        data = NumPyConsumer().bytes(arrays[0])
        self.assertEqual(data, written(arrays[0].size, 4, 9))
        while arrays:
            self.assertEqual(producer.live_allocations(), live)
            del arrays[0]
            gc.collect()
        self.assertEqual(producer.live_allocations(), 0)

    def test_gives_arrays_back_on_other_threads(self):
        live = producer.live_allocations()
        arrays = [[numpy.from_dlpack(view) for view in self.views("f16")] for _ in range(8)]
        producer.destroy(self.cache)
        self.cache = None
        for pair in arrays:
            self.assertEqual(producer.live_allocations(), live)
            thread = threading.Thread(target=pair.clear)
            thread.start()
            thread.join()
        self.assertEqual(producer.live_allocations(), 0)

    def test_gives_back_what_nobody_took(self):
        for view in self.views("f32"):
            for max_version in (None, (1, 0)):
                view.__dlpack__(max_version=max_version)
        # tearDown() sees whether the memory went with the cache.

    def test_takes_the_unversioned_form_for_reading(self):
        producer.write(self.cache, b"f32", 0, 3)
        for view in self.views("f32"):
            array = numpy.from_dlpack(OnlyUnversioned(view))
            self.assertEqual(NumPyConsumer().bytes(array), written(array.size, 4, 3))
            self.assertFalse(array.flags.writeable)  # a rule of NumPy's


class OnlyUnversioned:
    """A view as a consumer asks for it that does not know DLPack 1.0."""

    def __init__(self, view):
        self.view = view

    def __dlpack_device__(self):
        return self.view.__dlpack_device__()

    def __dlpack__(self, **_):
        return self.view.__dlpack__()


@unittest.skipUnless(torch, "without PyTorch")
class PyTorch(WithProducer):
    def test_reads_and_writes_every_view_in_place(self):
        for layer, state, itemsize in VIEWS:
            with self.subTest(layer=layer, state=state):
                self.check(TorchConsumer(), layer, state, itemsize, 11)

    def test_has_the_views_types_shape_and_strides(self):
        for layer, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16),
                             ("e4m3fn", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2),
                             ("e2m1x2", torch.float4_e2m1fn_x2), ("latent", torch.bfloat16)]:
            for view in self.views(layer):
                self.assertEqual(torch.from_dlpack(view).dtype, dtype)
        for view in self.views("bf16"):
            tensor = torch.from_dlpack(view)
            # Blocks of 8 tokens: planning has made the pages of all layers equal.
            self.assertEqual(tuple(tensor.shape), (2, NUM_BLOCKS, 8, 2, 6))
            self.assertEqual(tensor.stride()[2:], (12, 6, 1))

    def test_writes_where_numpy_reads(self):
        for view in self.views("f16"):
            tensor, array = torch.from_dlpack(view), numpy.from_dlpack(view)
            self.assertEqual(tensor.data_ptr(), array.ctypes.data)
            tensor[3, 1, 2, 5] = 1.5
            self.assertEqual(array[3, 1, 2, 5], 1.5)

    def test_does_not_see_that_a_view_is_read_only(self):
        for view in self.views("f32", read_only=True):
            torch.from_dlpack(view).fill_(1)
            self.assertEqual(numpy.from_dlpack(view).min(), 1)

    def test_keeps_the_memory_when_the_cache_is_gone(self):
        producer.write(self.cache, b"bf16", 0, 9)
        tensors = [torch.from_dlpack(view) for view in self.views("bf16")]
        tensors.append(tensors[0][1, 2:])
        live = producer.live_allocations()
        producer.destroy(self.cache)
        self.cache = None
        gc.collect()
        self.assertEqual(TorchConsumer().bytes(tensors[0]), written(tensors[0].numel(), 2, 9))
        while tensors:
            self.assertEqual(producer.live_allocations(), live)
            del tensors[0]
            gc.collect()
        self.assertEqual(producer.live_allocations(), 0)

    def test_takes_the_unversioned_form(self):
        for layer, state, itemsize in VIEWS:
            producer.write(self.cache, layer.encode(), state, 3)
            for view in self.views(layer, state):
                tensor = torch.from_dlpack(OnlyUnversioned(view))
                self.assertEqual(TorchConsumer().bytes(tensor),
                                 written(tensor.numel(), itemsize, 3))


@unittest.skipUnless(tvm_ffi, "without TVM")
class Tvm(WithProducer):
    def test_takes_every_view_in_the_unversioned_form(self):
        for layer, state, _ in VIEWS:
            for view in self.views(layer, state):
                with self.subTest(layer=layer, state=state):
                    tensor = tvm_ffi.from_dlpack(view)
                    if layer == "f32":
                        self.assertEqual(tuple(tensor.shape), (NUM_BLOCKS, 2, 4, 12))

    def test_hands_a_view_on_to_numpy(self):
        producer.write(self.cache, b"f32", 0, 3)
        for view in self.views("f32"):
            array = numpy.from_dlpack(tvm_ffi.from_dlpack(view))
            self.assertEqual(NumPyConsumer().bytes(array), written(array.size, 4, 3))


class FromPython(unittest.TestCase):
    """A cache made through the C interface alone, in memory of Python's."""

    def setUp(self):
        self.allocator = Allocator()
        self.cache = make_cache(kvpages, self.allocator, num_blocks=3)

    def test_a_capsule_that_nobody_took_is_good_as_long_as_its_view(self):
        view = View(self.cache, "layer")
        del self.cache
        left = [view.__dlpack__(), view.__dlpack__(max_version=(1, 1))]
        gc.collect()
        self.assertEqual(len(self.allocator.live), 1)
        del view
        gc.collect()
        self.assertEqual(len(self.allocator.live), 0)
        for capsule in left:
            for name in (VERSIONED, UNVERSIONED):
                self.assertFalse(ctypes.pythonapi.PyCapsule_IsValid(capsule, name))

    def test_what_cannot_be_had_is_refused(self):
        with self.assertRaisesRegex(RuntimeError, "no layer of the name"):
            View(self.cache, "another")
        with self.assertRaisesRegex(RuntimeError, "view 1"):
            View(self.cache, "layer", state=1).__dlpack__(max_version=(1, 0))
        with self.assertRaises(BufferError):
            View(self.cache, "layer", read_only=True).__dlpack__()
        with self.assertRaises(BufferError):
            View(self.cache, "layer").__dlpack__(copy=True)
        with self.assertRaises(BufferError):
            View(self.cache, "layer").__dlpack__(dl_device=(2, 0))

    @unittest.skipUnless(torch, "without PyTorch")
    def test_a_tensor_is_in_the_memory_of_the_allocator(self):
        tensor = torch.from_dlpack(View(self.cache, "layer"))
        self.assertEqual(tuple(tensor.shape), (3, 2, 16, 16))
        (address,) = self.allocator.live
        self.assertEqual(tensor.data_ptr(), address)
        tensor.fill_(1)
        self.assertEqual(ctypes.string_at(address, 3072), b"\x80\x3f" * 1536)  # 1 in bf16
        del self.cache
        gc.collect()
        self.assertEqual(tensor.sum().item(), 1536)
        del tensor
        self.assertEqual(len(self.allocator.live), 0)

    @unittest.skipUnless(numpy, "without NumPy")
    def test_numpy_reaches_bf16_as_integers(self):
        integers = numpy.from_dlpack(AsInteger(View(self.cache, "layer")))
        integers[2, 1, 15, 15] = 0x3F80
        (address,) = self.allocator.live
        self.assertEqual(ctypes.string_at(address + 3070, 2), b"\x80\x3f")
        del self.cache, integers
        gc.collect()
        self.assertEqual(len(self.allocator.live), 0)


class AsInteger:
    """A view of two-byte elements as uint16: what NumPy can take of a type that it has not."""

    DTYPE = 32 + 20  # where DLManagedTensorVersioned has its dl_tensor.dtype

    def __init__(self, view):
        self.view = view

    def __dlpack_device__(self):
        return self.view.__dlpack_device__()

    def __dlpack__(self, *, max_version=None, **_):
        given = self.view.__dlpack__(max_version=max_version)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer(given, VERSIONED)
        ctypes.c_uint8.from_address(pointer + self.DTYPE).value = 1  # kDLUInt; bits stay 16
        return given


if __name__ == "__main__":
    kvpages, producer = load(sys.argv[1]), Producer(sys.argv[2])
    kvpages.kvpages_memory_destroy.argtypes = kvpages.kvpages_plan_destroy.argtypes = [c_void_p]
    kvpages.kvpages_model_destroy.argtypes = kvpages.kvpages_backend_destroy.argtypes = [c_void_p]
    for library in (numpy, torch, tvm_ffi):
        if library is not None:
            print(f"{library.__name__} {library.__version__}")
    unittest.main(argv=sys.argv[:1])
