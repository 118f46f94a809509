//! The kernels' signatures: a launcher declares the kernels of a source with the names and types of their parameters, and
//! launches them with a value of that type. A test of each declaration compares it with the source.

mod arguments;
mod kernel;

#[cfg(test)]
pub(crate) mod tests;

pub(crate) use arguments::{
    AdamWArgs, AttentionArgs, AttentionBackwardArgs, ConvArgs, GradientArgs, HeadNorms, HopperAttentionArgs,
    HopperAttentionBackwardArgs, HopperConvArgs, HopperGemmArgs, LowRankArgs, MAX_SEGMENTS,
    MmaAttentionBackwardArgs, MmaGemmArgs, Nvfp4GemmArgs, PackedMatrixArgs, ProdigyArgs, RoundAttentionArgs,
    Segments, WideScoresArgs,
};
#[cfg(test)]
pub(crate) use kernel::KernelArgument;
pub(crate) use kernel::{Kernel, KernelByDtype, Parameters, pointer};

/// Declares all kernels of sources: a struct for each list of parameters, and the kernels that take it. `by dtype` stands for
/// two kernels, whose names end in `_f32` and `_bf16`.
macro_rules! kernels {
    ($($source:literal {
        $($Parameters:ident($($field:ident: $type:ty),*):
            $($KERNEL:ident = $name:literal $(by $dtype:ident)?),*;)*
    })*) => {
        $($(
            pub(crate) struct $Parameters {
                $(pub $field: $type,)*
            }

            impl $crate::kernels::Parameters for $Parameters {
                #[cfg(test)]
                const LIST: &'static [(&'static str, &'static str)] =
                    &[$((stringify!($field), <$type as $crate::kernels::KernelArgument>::TYPE)),*];

                fn with_pointers<T>(&self, call: impl FnOnce(&mut [*mut std::ffi::c_void]) -> T) -> T {
                    call(&mut [$($crate::kernels::pointer(&self.$field)),*])
                }
            }

            $($crate::kernels::kernels!(@ $source $Parameters $KERNEL $name $($dtype)?);)*
        )*)*

        #[cfg(test)]
        mod kernels {
            use super::*;

            #[test]
            fn match_their_source() {
                $($crate::kernels::tests::compare($source, &[
                    $($(($name, stringify!($($dtype)?), <$Parameters as $crate::kernels::Parameters>::LIST),)*)*
                ]);)*
            }
        }
    };
    (@ $source:literal $Parameters:ident $KERNEL:ident $name:literal dtype) => {
        pub(crate) const $KERNEL: $crate::kernels::KernelByDtype<$Parameters> = $crate::kernels::KernelByDtype {
            f32: $crate::kernels::Kernel::new($source, concat!($name, "_f32")),
            bf16: $crate::kernels::Kernel::new($source, concat!($name, "_bf16")),
        };
    };
    (@ $source:literal $Parameters:ident $KERNEL:ident $name:literal) => {
        pub(crate) const $KERNEL: $crate::kernels::Kernel<$Parameters> =
            $crate::kernels::Kernel::new($source, $name);
    };
}
pub(crate) use kernels;
