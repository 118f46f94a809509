//! Ember, the small built-in model. Absent without the feature `ember`.
//! Its tensors are views of the program's own bytes, read by the code that reads mapped files.

/// The name that selects the built-in model.
pub const NAME: &str = "ember";

/// Returns the packed model, a safetensors file.
#[cfg(feature = "ember")]
pub fn file() -> Option<&'static [u8]> {
    /// Aligned so that tensors, which start at multiples of 8 bytes in the file, are read in place.
    #[repr(C, align(64))]
    struct Aligned<T: ?Sized>(T);

    static FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../assets/ember/ember.safetensors"
    )));
    Some(&FILE.0)
}

/// Returns `None`: this build has no built-in model.
#[cfg(not(feature = "ember"))]
pub fn file() -> Option<&'static [u8]> {
    None
}

#[cfg(all(test, feature = "ember"))]
mod tests {
    use super::*;
    use kiln_weights::WeightSource;

    #[test]
    fn tensors_are_aligned_and_read_in_place() {
        let file = file().unwrap();
        let source = WeightSource::from_bytes(NAME, file).unwrap();
        for name in source.names().filter(|name| name.ends_with(".bias")) {
            let tensor = source.tensor(name).unwrap();
            let bytes = tensor.bytes().as_ptr();
            assert!(file.as_ptr_range().contains(&bytes), "{name} was copied");
            assert_eq!(bytes as usize % tensor.dtype().size(), 0, "{name}");
        }
    }
}
