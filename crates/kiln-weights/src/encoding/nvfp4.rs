//! The order of pairs and block scales in nvfp4 files.
//!
//! | order | first of a pair | block scales | known by |
//! |---|---|---|---|
//! | ComfyUI's and Black Forest Labs' | high half | in tiles of 128 × 4, padded | `X.comfy_quant`, or a list in the header |
//! | ModelOpt's, which diffusers uses | low half | in rows | a `quantization_config`, or names with separate q, k and v |
//! | ModelOpt's for other programs | low half | in rows or tiles | a `quantization_config` in the header |
//!
//! The shape of the scales tells rows and tiles apart only where tiles are padded. A file that leaves both possible is an
//! error: read in the wrong order, it gives noise.

use kiln_tensor::Shape;

/// The order of pairs and block scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Order {
    pub swizzled: bool,
    pub high_first: bool,
}

const COMFYUI: Order = Order { swizzled: true, high_first: true };
const MODELOPT: Order = Order { swizzled: false, high_first: false };
const MODELOPT_TILES: Order = Order { swizzled: true, high_first: false };

/// What a file says about the program that wrote it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    /// A layer is marked as nvfp4 in ComfyUI's way.
    pub comfyui: bool,
    /// ModelOpt wrote the header for other programs.
    pub modelopt_header: bool,
    /// A configuration beside the weights says that ModelOpt or diffusers wrote them.
    pub modelopt_config: bool,
    /// q, k and v are fused, as Black Forest Labs name them.
    pub fused: bool,
}

impl Origin {
    fn orders(self) -> &'static [Order] {
        match self {
            Origin { modelopt_header: true, .. } => &[MODELOPT, MODELOPT_TILES],
            Origin { comfyui: true, .. } => &[COMFYUI],
            Origin { modelopt_config: false, fused: true, .. } => &[COMFYUI, MODELOPT],
            _ => &[MODELOPT],
        }
    }

    /// The order of all layers, given by name, shape of the weight and shape of the block scales; or the layer that shows
    /// that there is none, and what is wrong.
    pub fn order<'l>(
        self,
        layers: impl Iterator<Item = (&'l str, [usize; 2], &'l Shape)> + Clone,
    ) -> Result<Order, (&'l str, String)> {
        let mut possible = self.orders().to_vec();
        for (name, weight, scales) in layers.clone() {
            let fits = |order: &Order| scales.dims() == order.shape(weight);
            if !possible.iter().any(fits) {
                let expected: Vec<String> =
                    possible.iter().map(|order| Shape::from(order.shape(weight)).to_string()).collect();
                let problem = format!("nvfp4 scales of shape {scales}, expected {}", expected.join(" or "));
                return Err((name, problem));
            }
            possible.retain(fits);
        }
        match (&possible[..], layers.map(|(name, ..)| name).next()) {
            ([order, rest @ ..], name) if rest.is_empty() || name.is_none() => Ok(*order),
            (_, name) => Err((name.unwrap_or_default(), self.undecided().to_owned())),
        }
    }

    fn undecided(self) -> &'static str {
        if self.modelopt_header {
            "nvfp4 scales that may be in rows or in tiles: ModelOpt's header does not say which; export without \
             `enable_swizzle_layout` and without metadata for other programs"
        } else {
            "nvfp4 values that may be in ComfyUI's order or in ModelOpt's: the header has no `_quantization_metadata`, as \
             files of Black Forest Labs and ComfyUI do, and there is no config.json whose `quant_method` is `modelopt` or \
             `bfl`; use the file as it was published"
        }
    }
}

impl Order {
    /// The shape of the block scales of a matrix.
    fn shape(self, [rows, cols]: [usize; 2]) -> [usize; 2] {
        let across = cols / 16;
        if self.swizzled { [rows.next_multiple_of(128), across.next_multiple_of(4)] } else { [rows, across] }
    }
}
