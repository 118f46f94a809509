//! Quantized formats that Kiln does not read, recognized by the names of their tensors.
//!
//! Without this, such a file would fail for a tensor that it "lacks" or whose shape is "wrong", or a scale that nobody reads
//! would silently change the image.

use std::collections::BTreeMap;

use super::Tensors;

/// A format and the endings of names by which it is recognized. Earlier formats share names with later ones.
const FORMATS: [(&str, &[&str]); 20] = [
    ("bitsandbytes nf4", &[".quant_state.bitsandbytes__nf4"]),
    ("bitsandbytes fp4", &[".quant_state.bitsandbytes__fp4"]),
    ("bitsandbytes (4 bits)", &[".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"]),
    ("bitsandbytes int8", &[".SCB", ".weight_format"]),
    ("quanto", &[".weight._data", ".weight._scale", ".weight._shift", ".weight_qtype"]),
    ("torchao", &["._weight_qdata", "._weight_scale", "._weight_zero_point", "._weight_int_data"]),
    (
        "SVDQuant (Nunchaku)",
        &[".wscales", ".wtscale", ".wcscales", ".smooth", ".smooth_factor", ".smooth_factor_orig"],
    ),
    ("SVDQuant (ModelOpt)", &[".svdquant_lora_a", ".svdquant_lora_b"]),
    ("ModelOpt AWQ", &[".pre_quant_scale"]),
    ("compressed-tensors, packed", &[".weight_packed", ".weight_shape", ".weight_global_scale", ".bitmask"]),
    ("asymmetric integers", &[".weight_zero_point", ".weight_zp"]),
    ("HQQ", &[".W_q"]),
    ("EETQ", &[".weight_scales"]),
    ("AQLM", &[".codebooks", ".codes"]),
    ("VPTQ", &[".centroids", ".indices"]),
    ("SDNQ", &[".svd_up", ".svd_down", ".zero_point"]),
    ("GPTQ or AWQ", &[".qweight", ".qzeros", ".g_idx"]),
    ("Mistral's fp8", &[".qscale_weight", ".qscale_act"]),
    ("mxfp4", &["_proj_blocks", "_proj_scales"]),
    ("a codebook", &[".weight_codebook", ".weight_s_rel", ".weight_s_channel"]),
];

/// Parts of a name by which ModelOpt's own checkpoints are recognized.
const MODELOPT: [&str; 2] = [".weight_quantizer.", ".input_quantizer."];
/// Names beside a matrix that are its scales in some format or other, but can be a norm's weight elsewhere.
const SCALES: [&str; 6] = [".scale", ".scales", ".zeros", ".zero", ".biases", ".zero_points"];

/// The format that Kiln can't read, and the tensor that shows it.
pub(super) fn find<'t>(
    tensors: &'t Tensors,
    metadata: &BTreeMap<String, String>,
) -> Option<(&'static str, &'t str)> {
    let names = || tensors.keys().map(String::as_str);
    let by_ending = FORMATS.iter().find_map(|(format, endings)| {
        let tensor = names().find(|name| endings.iter().any(|ending| name.ends_with(ending)))?;
        Some((*format, tensor))
    });
    // torchao describes every quantized tensor in the header, under the name it would have.
    let torchao = || {
        let text = metadata
            .iter()
            .find(|(_, text)| text.starts_with('{') && text.contains("\"_tensor_data_names\""))?;
        let module = text.0.rsplit_once('.').map_or("", |(module, _)| module);
        Some(("torchao", names().find(|name| name.starts_with(module))?))
    };
    let modelopt = || {
        let own = |name: &&str| MODELOPT.iter().any(|part| name.contains(part));
        Some(("ModelOpt's own quantizers, not exported", names().find(own)?))
    };
    by_ending
        .or_else(torchao)
        .or_else(modelopt)
        .or_else(|| Some(("scales of an unknown kind", scale(tensors)?)))
}

/// A tensor that scales the matrix beside it in a way that Kiln does not know.
fn scale(tensors: &Tensors) -> Option<&str> {
    let beside_matrix = |name: &&String| {
        let module = SCALES.iter().find_map(|ending| name.strip_suffix(ending));
        let weight = module.and_then(|module| tensors.get(&format!("{module}.weight")));
        weight.is_some_and(|(_, weight)| weight.shape.rank() == 2)
    };
    tensors.keys().find(beside_matrix).map(String::as_str)
}
