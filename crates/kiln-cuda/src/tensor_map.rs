//! Tensor maps: descriptors for Hopper's tensor memory accelerator (TMA).

use std::ffi::c_int;
use std::ptr::null;

use crate::error::Result;
use crate::sys::driver::{DevicePtr, Driver, MAP_BF16, MAP_L2_256, MAP_SWIZZLE_32, MAP_U8, TensorMap};

/// Most bytes in a row of a box: the swizzle width.
pub(crate) const BOX_BYTES: usize = 128;

/// Elements of a tensor map: their size is all that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapElement {
    Byte,
    Bf16,
}

impl MapElement {
    pub fn size(self) -> usize {
        match self {
            MapElement::Byte => 1,
            MapElement::Bf16 => 2,
        }
    }
}

impl Driver {
    /// Describes a tensor for copies of boxes of 128 bytes by `box_rows`.
    ///
    /// `sizes[0]` is the innermost axis; `strides` are the elements between rows, matrices and so on.
    pub fn encode_tensor_map<const N: usize, const M: usize>(
        &self,
        element: MapElement,
        at: DevicePtr,
        sizes: [usize; N],
        strides: [usize; M],
        box_rows: [usize; M],
    ) -> Result<TensorMap> {
        self.encode_narrow_tensor_map(element, at, sizes, strides, BOX_BYTES, box_rows)
    }

    /// The same for boxes of 32, 64 or 128 bytes, swizzled in rows of that width.
    pub fn encode_narrow_tensor_map<const N: usize, const M: usize>(
        &self,
        element: MapElement,
        at: DevicePtr,
        sizes: [usize; N],
        strides: [usize; M],
        box_bytes: usize,
        box_rows: [usize; M],
    ) -> Result<TensorMap> {
        assert_eq!(N, M + 1);
        let sizes = sizes.map(|n| n as u64);
        let bytes = strides.map(|n| (element.size() * n) as u64);
        let mut extent = [(box_bytes / element.size()) as u32; N];
        for (extent, box_rows) in extent[1..].iter_mut().zip(box_rows) {
            *extent = box_rows as u32;
        }
        let mut map = TensorMap::NONE;
        // SAFETY: all arrays have the length of the rank, the strides one less; the map is written.
        let status = unsafe {
            (self.tensor_map)(
                &mut map,
                match element {
                    MapElement::Byte => MAP_U8,
                    MapElement::Bf16 => MAP_BF16,
                },
                N as u32,
                at as *mut _,
                sizes.as_ptr(),
                if M == 0 { null() } else { bytes.as_ptr() },
                extent.as_ptr(),
                [1; N].as_ptr(),
                0,
                MAP_SWIZZLE_32 + (box_bytes / 32).ilog2() as c_int,
                MAP_L2_256,
                0,
            )
        };
        self.check("cuTensorMapEncodeTiled", status)?;
        Ok(map)
    }
}
