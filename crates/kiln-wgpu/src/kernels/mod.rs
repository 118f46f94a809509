//! The kernels: WGSL files with the constants that they are specialized by, and their compiled pipelines.

mod accessors;
mod pipelines;
mod template;

#[cfg(test)]
mod tests;

pub(crate) use pipelines::{Pipeline, Pipelines};
pub(crate) use template::Value::{self, Number, Word};
use template::{Constants, Shader};

/// A kernel: a WGSL file with directives (`template`), and the values of its constants.
pub(crate) struct Kernel {
    /// Its name in messages.
    pub name: &'static str,
    pub source: &'static str,
    /// Its constants, each with all values that it takes.
    pub constants: &'static [(&'static str, &'static [Value])],
}

/// The element types of activations.
pub(crate) const ACTIVATIONS: &[Value] = &[Word("f32"), Word("bf16")];

/// Bytes of the parameters of a launch: every device allows offsets that are multiples of this.
pub(crate) const PARAMS_BYTES: usize = 256;

/// Invocations of a workgroup in every kernel: what WebGPU guarantees.
pub(crate) const WORKGROUP: usize = 256;

impl Kernel {
    /// The source with these values of its constants, in their order.
    pub fn shader(&self, values: &[Value]) -> Result<Shader, String> {
        let names = self.constants.iter().map(|(name, _)| name.to_string());
        let constants: Constants = names.zip(values.iter().copied()).collect();
        let known = self.constants.len() == values.len()
            && self.constants.iter().zip(values).all(|((_, all), value)| all.contains(value));
        if !known {
            return Err(format!("kernel {} has no variant {values:?}", self.name));
        }
        template::expand(self.source, &constants, include).map_err(|e| format!("kernel {}: {e}", self.name))
    }
}

/// What several kernels share.
fn include(name: &str) -> Option<&'static str> {
    Some(match name {
        "math" => include_str!("../../kernels/math.wgsl"),
        "division" => include_str!("../../kernels/division.wgsl"),
        "activation" => include_str!("../../kernels/activation.wgsl"),
        "row_sums" => include_str!("../../kernels/row_sums.wgsl"),
        "weights" => include_str!("../../kernels/weights.wgsl"),
        "epilogue" => include_str!("../../kernels/epilogue.wgsl"),
        _ => return None,
    })
}
