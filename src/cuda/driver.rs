//! The driver's functions, looked up at once.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmemAccessDesc, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmodule, CUstream,
};
use libloading::Library;

use super::error::CudaError;

/// The name under which the driver installs its library. The one without a number is left alone: it
/// comes with toolkits too, as a stub that only a linker can use.
const LIBRARY: &str = "libcuda.so.1";

/// The oldest driver: the first that understands the kernels' PTX 7.0.
const OLDEST_VERSION: c_int = 11000;

/// CUDA_ERROR_NO_DEVICE
const NO_DEVICE: u32 = 100;

/// Makes the table: a field for each function, and its loader. Results are plain numbers, because
/// a driver may return codes that an enum of today does not have.
macro_rules! table {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The driver's functions, under their own names.
        #[allow(non_snake_case)]
        pub(super) struct Driver {
            /// As cuDriverGetVersion() says: 12040 is CUDA 12.4.
            pub version: c_int,
            $(pub $name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl Driver {
            fn look_up(library: &Library, version: c_int) -> Result<Driver, CudaError> {
                Ok(Driver {
                    version,
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the driver declares its function with these arguments.
                        let found = unsafe { library.get(name.as_bytes()) };
                        *found.map_err(|_| CudaError::DriverIncomplete {
                            function: stringify!($name),
                            version,
                        })?
                    },)*
                })
            }
        }
    };
}

table! {
    cuInit(c_uint);
    cuGetErrorName(c_uint, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetAttribute(*mut c_int, c_uint, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuCtxGetDevice(*mut CUdevice);
    cuCtxSynchronize();
    cuThreadExchangeStreamCaptureMode(*mut c_uint);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, c_uint);
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    cuMemRelease(CUmemGenericAllocationHandle);
    cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamDestroy_v2(CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamIsCapturing(CUstream, *mut c_uint);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventSynchronize(CUevent);
    cuModuleLoadData(*mut CUmodule, *const c_void);
    cuModuleUnload(CUmodule);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuLaunchKernel(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
        *mut *mut c_void, *mut *mut c_void
    );
}

/// Calls a function of the driver; a code other than 0 is an error that names the function.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let driver: &$crate::cuda::driver::Driver = $driver;
        // SAFETY: the arguments are what the function declares; pointers among them are to locals,
        // or vouched for by whoever calls the method around this.
        let code = unsafe { (driver.$name)($($argument),*) };
        driver.check(stringify!($name), code)
    }};
}
pub(super) use call;

impl Driver {
    /// The driver of this machine, ready for use. A failure is not kept: the next call tries again.
    pub(super) fn get() -> Result<&'static Driver, CudaError> {
        static LOADED: OnceLock<Driver> = OnceLock::new();
        let driver = match LOADED.get() {
            Some(driver) => driver,
            None => {
                let driver = Driver::open()?;
                LOADED.get_or_init(|| driver)
            }
        };
        // Asked for a second time this does nothing, and costs next to nothing.
        match call!(driver, cuInit(0)) {
            Err(CudaError::DriverFailed { code, .. }) if code == NO_DEVICE => {
                Err(CudaError::NoDevice)
            }
            other => other.map(|()| driver),
        }
    }

    fn open() -> Result<Driver, CudaError> {
        // SAFETY: opening the driver runs its own initialisers only.
        let library = unsafe { Library::new(LIBRARY) };
        let library = library.map_err(|error| CudaError::DriverMissing {
            reason: loader_text(&error),
        })?;
        let driver =
            Driver::check_version(&library).and_then(|version| Driver::look_up(&library, version));
        // A driver has threads of its own and stays loaded, even one that we cannot use.
        std::mem::forget(library);
        driver
    }

    /// An old driver lacks functions, so its age is asked for before they are looked up.
    fn check_version(library: &Library) -> Result<c_int, CudaError> {
        type GetVersion = unsafe extern "C" fn(*mut c_int) -> u32;
        // SAFETY: the driver declares its function like this.
        let get_version = unsafe { library.get::<GetVersion>(b"cuDriverGetVersion\0") };
        let get_version = get_version.map_err(|_| CudaError::DriverIncomplete {
            function: "cuDriverGetVersion",
            version: 0,
        })?;
        let mut version = 0;
        // SAFETY: the pointer is to a local; the function needs no initialised driver.
        let code = unsafe { get_version(&mut version) };
        if code != 0 {
            return Err(CudaError::DriverFailed {
                call: "cuDriverGetVersion",
                code,
                name: "the driver was not asked for a name".to_owned(),
            });
        }
        if version < OLDEST_VERSION {
            return Err(CudaError::DriverTooOld {
                version,
                needed: OLDEST_VERSION,
            });
        }
        Ok(version)
    }

    pub(super) fn check(&self, call: &'static str, code: u32) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        Err(CudaError::DriverFailed {
            call,
            code,
            name: self.name_of(code),
        })
    }

    fn name_of(&self, code: u32) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the pointer is to a local.
        let found = unsafe { (self.cuGetErrorName)(code, &mut name) };
        if found != 0 || name.is_null() {
            return "no name".to_owned();
        }
        // SAFETY: the driver returns static strings.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    }
}

/// What the loader said; the error itself only says that it did.
fn loader_text(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error);
    let text = source.map_or_else(|| error.to_string(), ToString::to_string);
    if text.contains(LIBRARY) {
        return text;
    }
    format!("{LIBRARY}: {text}")
}
