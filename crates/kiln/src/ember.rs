//! Ember, the small model inside the program. Without the feature `ember` there is none.

/// What it is called wherever a model is named.
pub const NAME: &str = "ember";

/// The packed model, a safetensors file.
#[cfg(feature = "ember")]
pub fn file() -> Option<&'static [u8]> {
    /// The file places its tensors at multiples of 8 bytes; so they can be read where they are.
    #[repr(C, align(64))]
    struct Aligned<T: ?Sized>(T);

    static FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../assets/ember/ember.safetensors"
    )));
    Some(&FILE.0)
}

/// The packed model, which this build is without.
#[cfg(not(feature = "ember"))]
pub fn file() -> Option<&'static [u8]> {
    None
}

#[cfg(all(test, feature = "ember"))]
mod tests {
    use super::*;
    use kiln_weights::WeightSource;

    #[test]
    fn tensors_are_windows_into_the_program_and_aligned() {
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
