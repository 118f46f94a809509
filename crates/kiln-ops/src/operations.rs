//! A trait of operations and the list of its methods, from one declaration.

/// Declares a trait, and a macro that writes its methods in `impl` blocks, so that a backend which treats all operations
/// alike does not repeat their signatures.
///
/// The first line of a declaration is `$`, which the body of the list needs and a macro cannot write itself.
///
/// - `own`: what every backend writes itself.
/// - `required`: operations without a default.
/// - `provided`: operations with one, which is made of other operations. A backend that leaves them out of its `impl` gets
///   the defaults.
macro_rules! operations {
    ($d:tt
        $(#[$list_doc:meta])*
        macro $list:ident;

        $(#[$doc:meta])*
        pub trait $Trait:ident: $bound:ident $(+ $bounds:ident)*;

        own { $($own:tt)* }
        required {$(
            $(#[$required_doc:meta])*
            fn $required:ident $(<const $required_n:ident: usize>)? (
                &$required_self:ident $(, $required_arg:ident: $required_type:ty)* $(,)?
            ) -> $required_result:ty;
        )*}
        provided {$(
            $(#[$provided_doc:meta])*
            fn $provided:ident $(<const $provided_n:ident: usize>)? (
                &$provided_self:ident $(, $provided_arg:ident: $provided_type:ty)* $(,)?
            ) -> $provided_result:ty $default:block
        )*}
    ) => {
        $(#[$doc])*
        pub trait $Trait: $bound $(+ $bounds)* {
            $($own)*

            $(
                $(#[$required_doc])*
                fn $required $(<const $required_n: usize>)? (
                    &$required_self $(, $required_arg: $required_type)*
                ) -> $required_result;
            )*

            $(
                $(#[$provided_doc])*
                fn $provided $(<const $provided_n: usize>)? (
                    &$provided_self $(, $provided_arg: $provided_type)*
                ) -> $provided_result $default
            )*
        }

        $(#[$list_doc])*
        #[macro_export]
        macro_rules! $list {
            (required, $d forward:ident) => {$(
                fn $required $(<const $required_n: usize>)? (
                    &$required_self $(, $required_arg: $required_type)*
                ) -> $required_result {
                    $d forward!($required_self, $required($($required_arg),*))
                }
            )*};
            (provided, $d forward:ident) => {$(
                fn $provided $(<const $provided_n: usize>)? (
                    &$provided_self $(, $provided_arg: $provided_type)*
                ) -> $provided_result {
                    $d forward!($provided_self, $provided($($provided_arg),*))
                }
            )*};
            (names) => { [$(stringify!($required),)* $(stringify!($provided),)*] };
        }
    };
}
