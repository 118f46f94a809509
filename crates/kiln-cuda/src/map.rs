//! Tensors as the copy engine of Hopper and later sees them.

use std::ptr::null;

use crate::error::Result;
use crate::sys::driver::{DevicePtr, Driver, MAP_BF16, MAP_L2_256, MAP_SWIZZLE_128, TensorMap};

/// Elements of bf16 in a row of a box: 128 bytes, which are swizzled.
pub(crate) const BOX_COLUMNS: usize = 64;

impl Driver {
    /// A tensor of bf16 with rows of `sizes[0]` elements, `steps` elements from one row, matrix … to the next, of which
    /// boxes of 64 elements by `rows` are copied.
    pub fn map_tensor<const N: usize, const M: usize>(
        &self,
        at: DevicePtr,
        sizes: [usize; N],
        steps: [usize; M],
        rows: [usize; M],
    ) -> Result<TensorMap> {
        assert_eq!(N, M + 1);
        let sizes = sizes.map(|n| n as u64);
        let bytes = steps.map(|n| 2 * n as u64);
        let mut extent = [BOX_COLUMNS as u32; N];
        for (extent, rows) in extent[1..].iter_mut().zip(rows) {
            *extent = rows as u32;
        }
        let mut map = TensorMap::NONE;
        // SAFETY: all arrays have the rank's length, the strides' one less; the map is written.
        let status = unsafe {
            (self.tensor_map)(
                &mut map,
                MAP_BF16,
                N as u32,
                at as *mut _,
                sizes.as_ptr(),
                if M == 0 { null() } else { bytes.as_ptr() },
                extent.as_ptr(),
                [1; N].as_ptr(),
                0,
                MAP_SWIZZLE_128,
                MAP_L2_256,
                0,
            )
        };
        self.check("cuTensorMapEncodeTiled", status)?;
        Ok(map)
    }
}
