//! Memory of the caller: structures that begin with their size, arrays of them, and texts.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;

use crate::status::Failure;

/// No structure is this large: a larger size is garbage.
const MAX_SIZE: usize = 4096;
/// No array is this long.
const MAX_COUNT: usize = 1024;

/// A structure of the header.
///
/// # Safety
/// It is `repr(C)`, its first field is its size as a `usize`, and all bytes zero are a valid value.
pub(crate) unsafe trait SizedStruct: Copy {
    /// Its name in C.
    const NAME: &'static str;
}

/// Reads a structure; NULL is `None`. Fields that an older caller does not know are zero.
///
/// # Safety
/// `pointer` is NULL or points to as many readable bytes as the size in its first field says.
pub(crate) unsafe fn read<T: SizedStruct>(pointer: *const T) -> Result<Option<T>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: at least the size is readable, as the caller promises.
    let size = unsafe { size_of_struct(pointer)? };
    let known = size.min(size_of::<T>());
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: `known` bytes are readable there and fit here.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), value.as_mut_ptr().cast(), known) };
    // SAFETY: the caller promises `size` readable bytes.
    let bytes = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), size) };
    if bytes[known..].iter().any(|byte| *byte != 0) {
        return Err(Failure::invalid(format!(
            "the {} has {size} bytes and sets fields that this version of the library does not know (it has {})",
            T::NAME,
            size_of::<T>()
        ))
        .hint("update the library, or leave the new fields at zero"));
    }
    // SAFETY: zero bytes and those of the caller's structure are a value of its type.
    Ok(Some(unsafe { value.assume_init() }))
}

/// Reads an array of structures, which all have the size that the first one says.
///
/// # Safety
/// `pointer` points to `count` structures, each as [`read`] needs it.
pub(crate) unsafe fn read_all<T: SizedStruct>(pointer: *const T, count: usize) -> Result<Vec<T>, Failure> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if pointer.is_null() {
        return Err(Failure::invalid(format!("the array of {count} {} is NULL", T::NAME)));
    }
    if count > MAX_COUNT {
        return Err(Failure::invalid(format!("{count} {} are too many; at most {MAX_COUNT}", T::NAME)));
    }
    // SAFETY: the first structure has a size.
    let stride = unsafe { size_of_struct(pointer)? };
    let mut all = Vec::with_capacity(count);
    for i in 0..count {
        // SAFETY: the array has `count` structures of this size.
        let element = unsafe { pointer.byte_add(i * stride) };
        // SAFETY: as above; only the size is read.
        let size = unsafe { element.cast::<usize>().read_unaligned() };
        if size != stride {
            let message =
                format!("the size of {} number {i} is {size}, that of the first is {stride}", T::NAME);
            return Err(Failure::invalid(message).hint("set the size of each to the same sizeof"));
        }
        // SAFETY: as above.
        all.extend(unsafe { read(element)? });
    }
    Ok(all)
}

/// Reads the size of a structure and checks that it can be one.
///
/// # Safety
/// `pointer` points to a readable `usize`.
unsafe fn size_of_struct<T: SizedStruct>(pointer: *const T) -> Result<usize, Failure> {
    // SAFETY: promised by the caller.
    let size = unsafe { pointer.cast::<usize>().read_unaligned() };
    if !(size_of::<usize>()..=MAX_SIZE).contains(&size) {
        let name = T::NAME;
        return Err(Failure::invalid(format!("the size of the {name} is {size}"))
            .hint(format!("set its first field to sizeof({name})")));
    }
    Ok(size)
}

/// Writes a structure for the caller, as much of it as fits the size in its first field.
///
/// # Safety
/// `pointer` is NULL or points to a writable structure with its size set.
pub(crate) unsafe fn write<T: SizedStruct>(pointer: *mut T, value: &T) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::invalid(format!("the {} is NULL", T::NAME)));
    }
    // SAFETY: promised by the caller.
    let size = unsafe { size_of_struct(pointer)? };
    let skipped = size_of::<usize>();
    let length = size.min(size_of::<T>()) - skipped;
    let from = std::ptr::from_ref(value).cast::<u8>();
    // SAFETY: both have that many bytes after their size, which stays as it is.
    unsafe { std::ptr::copy_nonoverlapping(from.add(skipped), pointer.cast::<u8>().add(skipped), length) };
    Ok(())
}

/// Reads a text; NULL is `None`. Messages call it `name`.
///
/// # Safety
/// `pointer` is NULL or points to a text that ends in NUL.
pub(crate) unsafe fn text(pointer: *const c_char, name: &str) -> Result<Option<String>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: promised by the caller.
    let bytes = unsafe { CStr::from_ptr(pointer) }.to_bytes();
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(Some(text.to_owned())),
        Err(error) => {
            let at = error.valid_up_to();
            Err(Failure::invalid(format!("the {name} is not UTF-8, from byte {at}"))
                .hint("encode it as UTF-8"))
        }
    }
}

/// As [`text`]; an empty text is `None`, too.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn name(pointer: *const c_char, name: &str) -> Result<Option<String>, Failure> {
    // SAFETY: promised by the caller.
    Ok(unsafe { text(pointer, name)? }.filter(|text| !text.is_empty()))
}
