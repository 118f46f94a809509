//! Ember, the small built-in model, and its undistilled variant, on which LoRAs are trained. Absent without the feature
//! `ember`. Its tensors are views of the program's own bytes, read by the code that reads mapped files.

/// The name that selects the built-in model.
pub const NAME: &str = "ember";

/// The name of the undistilled variant, which is stored as its difference from Ember.
pub const BASE: &str = "ember-base";

/// Returns whether a name is that of a built-in model.
pub fn is_built_in(name: &str) -> bool {
    [NAME, BASE].contains(&name) && file().is_some()
}

#[cfg(feature = "ember")]
macro_rules! include_aligned {
    ($name:literal) => {{
        /// Aligned so that tensors, which start at multiples of 8 bytes in the file, are read in place.
        #[repr(C, align(64))]
        struct Aligned<T: ?Sized>(T);

        static FILE: &Aligned<[u8]> =
            &Aligned(*include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/ember/", $name)));
        Some(&FILE.0)
    }};
}

/// Returns the packed model, a safetensors file.
#[cfg(feature = "ember")]
pub fn file() -> Option<&'static [u8]> {
    include_aligned!("ember.safetensors")
}

/// Returns the difference of [`BASE`] from [`file`], a safetensors file.
#[cfg(feature = "ember")]
pub fn base_file() -> Option<&'static [u8]> {
    include_aligned!("ember-base.safetensors")
}

/// Returns `None`: this build has no built-in model.
#[cfg(not(feature = "ember"))]
pub fn file() -> Option<&'static [u8]> {
    None
}

/// Returns `None`: this build has no built-in model.
#[cfg(not(feature = "ember"))]
pub fn base_file() -> Option<&'static [u8]> {
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

    #[test]
    fn the_base_is_a_difference_from_this_ember() {
        let delta = WeightSource::from_bytes(BASE, base_file().unwrap()).unwrap();
        assert!(delta.is_delta());
        delta.apply_delta(file().unwrap()).unwrap();
    }
}
