//! The CUDA driver (libcuda).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::functions;
use crate::error::{Error, Result};

/// Address in device memory.
pub(crate) type DevicePtr = u64;
type Handle = *mut c_void;
type Status = c_int;

/// An opaque tensor map, for copies by the TMA.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorMap([u64; 16]);

impl TensorMap {
    /// An unused tensor map.
    pub const NONE: TensorMap = TensorMap([0; 16]);
}

functions! {
    /// The driver.
    Driver {
        fn init = "cuInit"(c_uint) -> Status;
        fn version = "cuDriverGetVersion"(*mut c_int) -> Status;
        fn device_count = "cuDeviceGetCount"(*mut c_int) -> Status;
        fn device_get = "cuDeviceGet"(*mut c_int, c_int) -> Status;
        fn device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int) -> Status;
        fn device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int) -> Status;
        fn device_total_mem = "cuDeviceTotalMem_v2"(*mut usize, c_int) -> Status;
        fn context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int) -> Status;
        fn context_release = "cuDevicePrimaryCtxRelease_v2"(c_int) -> Status;
        fn context_set = "cuCtxSetCurrent"(Handle) -> Status;
        fn mem_info = "cuMemGetInfo_v2"(*mut usize, *mut usize) -> Status;
        fn mem_alloc = "cuMemAlloc_v2"(*mut DevicePtr, usize) -> Status;
        fn mem_free = "cuMemFree_v2"(DevicePtr) -> Status;
        fn copy_to_device = "cuMemcpyHtoDAsync_v2"(DevicePtr, *const c_void, usize, Handle) -> Status;
        fn copy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, DevicePtr, usize, Handle) -> Status;
        fn copy_on_device = "cuMemcpyDtoDAsync_v2"(DevicePtr, DevicePtr, usize, Handle) -> Status;
        fn host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint) -> Status;
        fn host_free = "cuMemFreeHost"(*mut c_void) -> Status;
        fn stream_create = "cuStreamCreate"(*mut Handle, c_uint) -> Status;
        fn stream_destroy = "cuStreamDestroy_v2"(Handle) -> Status;
        fn stream_wait = "cuStreamSynchronize"(Handle) -> Status;
        fn stream_wait_event = "cuStreamWaitEvent"(Handle, Handle, c_uint) -> Status;
        fn stream_begin_capture = "cuStreamBeginCapture_v2"(Handle, c_int) -> Status;
        fn stream_end_capture = "cuStreamEndCapture"(Handle, *mut Handle) -> Status;
        fn graph_instantiate = "cuGraphInstantiateWithFlags"(*mut Handle, Handle, u64) -> Status;
        fn graph_launch = "cuGraphLaunch"(Handle, Handle) -> Status;
        fn graph_destroy = "cuGraphDestroy"(Handle) -> Status;
        fn graph_exec_destroy = "cuGraphExecDestroy"(Handle) -> Status;
        fn event_create = "cuEventCreate"(*mut Handle, c_uint) -> Status;
        fn event_record = "cuEventRecord"(Handle, Handle) -> Status;
        fn event_query = "cuEventQuery"(Handle) -> Status;
        fn event_wait = "cuEventSynchronize"(Handle) -> Status;
        fn event_elapsed = "cuEventElapsedTime"(*mut f32, Handle, Handle) -> Status;
        fn event_destroy = "cuEventDestroy_v2"(Handle) -> Status;
        fn module_load = "cuModuleLoadData"(*mut Handle, *const c_void) -> Status;
        fn module_unload = "cuModuleUnload"(Handle) -> Status;
        fn module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char) -> Status;
        fn function_set_attribute = "cuFuncSetAttribute"(Handle, c_int, c_int) -> Status;
        fn launch = "cuLaunchKernel"(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
        ) -> Status;
        fn tensor_map = "cuTensorMapEncodeTiled"(
            *mut TensorMap, c_int, c_uint, *mut c_void, *const u64, *const u64, *const u32, *const u32, c_int, c_int, c_int, c_int
        ) -> Status;
        fn error_name = "cuGetErrorName"(Status, *mut *const c_char) -> Status;
        fn error_text = "cuGetErrorString"(Status, *mut *const c_char) -> Status;
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NO_DEVICE`.
pub(crate) const NO_DEVICE: c_int = 100;
/// `CU_EVENT_BLOCKING_SYNC`: waiting threads sleep.
pub(crate) const EVENT_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const EVENT_NO_TIME: c_uint = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: allows allocations during capture.
pub(crate) const CAPTURE_RELAXED: c_int = 2;
/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(crate) const FUNCTION_SHARED_BYTES: c_int = 8;
/// `CU_TENSOR_MAP_DATA_TYPE_UINT8`.
pub(crate) const MAP_U8: c_int = 0;
/// `CU_TENSOR_MAP_DATA_TYPE_BFLOAT16`.
pub(crate) const MAP_BF16: c_int = 9;
/// `CU_TENSOR_MAP_SWIZZLE_32B`; those of 64 and 128 bytes follow.
pub(crate) const MAP_SWIZZLE_32: c_int = 1;
/// `CU_TENSOR_MAP_L2_PROMOTION_L2_256B`.
pub(crate) const MAP_L2_256: c_int = 3;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
pub(crate) const DEVICE_PROCESSORS: c_int = 16;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
pub(crate) const DEVICE_MAJOR: c_int = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
pub(crate) const DEVICE_MINOR: c_int = 76;
/// `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`.
pub(crate) const DEVICE_SHARED_BYTES: c_int = 97;

impl Driver {
    /// Converts a status into an error that names the call.
    pub fn check(&self, call: &'static str, status: Status) -> Result<()> {
        match status {
            0 => Ok(()),
            status => Err(Error::Call { call, what: self.describe(status) }),
        }
    }

    fn describe(&self, status: Status) -> String {
        let text = |f: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text = std::ptr::null();
            // SAFETY: the driver returns static strings or leaves the pointer null.
            unsafe {
                f(status, &mut text);
                if text.is_null() {
                    String::new()
                } else {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
            }
        };
        format!("{} ({status}): {}", text(self.error_name), text(self.error_text))
    }
}
