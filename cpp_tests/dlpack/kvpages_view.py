"""Views of a cache of kvpages in Python, for whatever library speaks DLPack; nothing is copied.

    library = load("libkvpages.so")
    cache = Cache(library, handle)            # a kvpages_cache * that an engine made
    keys_and_values = torch.from_dlpack(View(cache, "model.layers.0.self_attn"))
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_uint32, c_void_p, py_object

# Names of capsules.
VERSIONED, UNVERSIONED, USED = b"dltensor_versioned", b"dltensor", b"used_dltensor"
READ_ONLY = 1  # KVPAGES_DLPACK_READ_ONLY


class Device(ctypes.Structure):
    """kvpages_device."""

    _fields_ = [("kind", c_uint32), ("ordinal", c_uint32), ("context", c_void_p)]


def load(path):
    """The library, and the types of what is called here."""
    library = ctypes.CDLL(path)
    for function, arguments in {
        "kvpages_cache_find_layer": [c_void_p, c_char_p, POINTER(c_size_t)],
        "kvpages_cache_get_device": [c_void_p, POINTER(Device)],
        "kvpages_cache_export_dlpack":
            [c_void_p, c_size_t, c_size_t, c_uint32, POINTER(c_void_p)],
        "kvpages_cache_export_dlpack_unversioned":
            [c_void_p, c_size_t, c_size_t, POINTER(c_void_p)],
    }.items():
        getattr(library, function).argtypes = arguments
        getattr(library, function).restype = c_int32
    for function in ["kvpages_cache_destroy", "kvpages_dlpack_destroy",
                     "kvpages_dlpack_destroy_unversioned"]:
        getattr(library, function).argtypes = [c_void_p]
        getattr(library, function).restype = None
    library.kvpages_last_error_message.restype = c_char_p
    return library


def check(library, status):
    if status != 0:
        raise RuntimeError(library.kvpages_last_error_message().decode())


class Cache:
    """A cache, destroyed with this object. Arrays made of its views keep its memory."""

    def __init__(self, library, handle):
        self.library, self.handle = library, handle

    def __del__(self):
        self.library.kvpages_cache_destroy(self.handle)


class Capsules:
    """The capsules that an object handed out. A consumer renames the one that it takes; what nobody
    took is given back with the object. (An engine with C code of its own gives each capsule a
    destructor instead, which must not be Python: it may run while an error is on its way.)"""

    def __init__(self):
        self.given = []

    def new(self, tensor, name, destroy):
        self.given = [entry for entry in self.given if _python.PyCapsule_IsValid(*entry[:2])]
        made = _python.PyCapsule_New(tensor, name, None)
        self.given.append((made, name, destroy))
        return made

    def __del__(self):
        for made, name, destroy in self.given:
            if _python.PyCapsule_IsValid(made, name):
                tensor = _python.PyCapsule_GetPointer(made, name)
                _python.PyCapsule_SetName(made, USED)  # so that nobody takes it any more
                destroy(tensor)


class View:
    """A view of a layer, or one of its states: for numpy.from_dlpack(), torch.from_dlpack()."""

    def __init__(self, cache, layer, state=0, read_only=False):
        self.cache, self.state, self.read_only = cache, state, read_only
        self.capsules = Capsules()
        number = c_size_t()
        check(cache.library, cache.library.kvpages_cache_find_layer(
            cache.handle, layer.encode(), byref(number)))
        self.layer = number.value

    def __dlpack_device__(self):
        device = Device()
        check(self.cache.library,
              self.cache.library.kvpages_cache_get_device(self.cache.handle, byref(device)))
        return (2, device.ordinal) if device.kind == 1 else (1, 0)  # kDLCUDA, kDLCPU

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("a view is handed out as it is and where it is")
        library, tensor = self.cache.library, c_void_p()
        if max_version is not None and max_version[0] >= 1:
            check(library, library.kvpages_cache_export_dlpack(
                self.cache.handle, self.layer, self.state,
                READ_ONLY if self.read_only else 0, byref(tensor)))
            return self.capsules.new(tensor, VERSIONED, library.kvpages_dlpack_destroy)
        if self.read_only:
            raise BufferError("DLPack before 1.0 cannot say that a tensor is read-only")
        check(library, library.kvpages_cache_export_dlpack_unversioned(
            self.cache.handle, self.layer, self.state, byref(tensor)))
        return self.capsules.new(tensor, UNVERSIONED, library.kvpages_dlpack_destroy_unversioned)


_python = ctypes.pythonapi
_python.PyCapsule_New.restype = py_object
_python.PyCapsule_New.argtypes = [c_void_p, c_char_p, c_void_p]
_python.PyCapsule_IsValid.argtypes = [py_object, c_char_p]
_python.PyCapsule_GetPointer.restype = c_void_p
_python.PyCapsule_GetPointer.argtypes = [py_object, c_char_p]
_python.PyCapsule_SetName.argtypes = [py_object, c_char_p]
