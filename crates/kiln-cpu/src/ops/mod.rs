//! One file per family of operations.

pub(crate) mod attention;
pub(crate) mod conv;
pub(crate) mod elementwise;
pub(crate) mod epilogue;
pub(crate) mod group_norm;
pub(crate) mod linear;
pub(crate) mod movement;
pub(crate) mod norm;
