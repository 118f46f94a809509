//! What an order may ask for, and how it is refused.

use crate::engine::{Catalogue, Trouble};
use crate::{LoraOrder, Order};

/// What is allowed.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of a request.
    pub body: usize,
    /// Bytes of all requests that are read at the same time.
    pub bodies: usize,
    /// Pixels of a picture that is sent.
    pub input_pixels: u64,
    /// Pictures that an order may work from.
    pub references: usize,
    /// Bytes of a prompt.
    pub prompt: usize,
    /// Steps.
    pub steps: u32,
    /// The longest side, in pixels.
    pub side: u32,
    /// Pixels of a picture to paint.
    pub pixels: u64,
    /// Pictures of one order.
    pub pictures: u32,
    /// LoRAs of one order.
    pub loras: usize,
    /// Orders that wait.
    pub queue: usize,
    /// Connections at the same time.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body: 64 << 20,
            bodies: 256 << 20,
            input_pixels: 64 << 20,
            references: 10,
            prompt: 8000,
            steps: 200,
            side: 4096,
            pixels: 4 << 20,
            pictures: 10,
            loras: 8,
            queue: 64,
            connections: 512,
        }
    }
}

impl Limits {
    /// Checks the numbers and names of an order; its pictures are checked when they are read.
    pub fn check(&self, order: &Order, catalogue: &dyn Catalogue) -> Result<(), Trouble> {
        let wrong = |message: String| Err(Trouble::order("invalid_value", message));
        for (name, text) in
            [("prompt", Some(&order.prompt)), ("negative_prompt", order.negative_prompt.as_ref())]
        {
            let bytes = text.map_or(0, |text| text.len());
            if bytes > self.prompt {
                let most = self.prompt;
                return Err(Trouble::order(
                    "prompt_too_long",
                    format!("{name} has {bytes} bytes, at most {most} are read"),
                ));
            }
        }
        if order.prompt.trim().is_empty() {
            return wrong("the prompt is empty: say what to paint".into());
        }
        let numbers = [
            ("n", order.n, 1, self.pictures),
            ("steps", order.steps, 1, self.steps),
            ("width", order.width, 16, self.side),
            ("height", order.height, 16, self.side),
            ("mask_padding", order.mask_padding, 0, self.side),
            ("output_compression", order.output_compression.map(u32::from), 0, 100),
        ];
        for (name, number, least, most) in numbers {
            if number.is_some_and(|n| n < least || n > most) {
                let found = number.unwrap_or_default();
                return wrong(format!("{name} must lie between {least} and {most}, found {found}"));
            }
        }
        if let (Some(width), Some(height)) = (order.width, order.height)
            && u64::from(width) * u64::from(height) > self.pixels
        {
            let most = self.pixels;
            return wrong(format!(
                "a picture of {width}x{height} is too large: at most {most} pixels are painted"
            ));
        }
        if order.guidance.is_some_and(|g| !(0.0..=100.0).contains(&g)) {
            return wrong("guidance must lie between 0 and 100".into());
        }
        if order.strength.is_some_and(|s| !(0.0..=1.0).contains(&s)) {
            return wrong("strength must lie between 0 and 1".into());
        }
        if order.sources().count() > self.references {
            return wrong(format!("an order may work from {} pictures at most", self.references));
        }
        if order.init.is_none() && (order.mask.is_some() || order.strength.is_some()) {
            return wrong("a mask or a strength needs a picture to start from".into());
        }
        if order.mask.is_none() && order.mask_padding.is_some() {
            return wrong("mask_padding needs a mask".into());
        }
        self.names(order, catalogue)
    }

    /// A name is one of the list, so it can't lead out of a folder.
    fn names(&self, order: &Order, catalogue: &dyn Catalogue) -> Result<(), Trouble> {
        if order.loras.len() > self.loras {
            return Err(Trouble::order(
                "invalid_value",
                format!("at most {} LoRAs act together", self.loras),
            ));
        }
        if let Some(name) = &order.model {
            let models = catalogue.models();
            if !models.iter().any(|model| model.name == *name) {
                let known = models.iter().map(|m| m.name.as_str()).collect::<Vec<_>>().join(", ");
                let message = format!("there is no model `{}`; there are: {known}", shown(name));
                return Err(Trouble::order("model_not_found", message));
            }
        }
        if order.loras.is_empty() {
            return Ok(());
        }
        let known = catalogue.loras();
        for LoraOrder { name, weight } in &order.loras {
            if !known.contains(name) {
                let message = format!("there is no LoRA `{}`; there are: {}", shown(name), known.join(", "));
                return Err(Trouble::order("lora_not_found", message));
            }
            if !weight.is_finite() || weight.abs() > 100.0 {
                return Err(Trouble::order(
                    "invalid_value",
                    format!("the weight of LoRA `{name}` must lie between -100 and 100"),
                ));
            }
        }
        Ok(())
    }
}

/// A foreign name in a message: not endless.
fn shown(name: &str) -> String {
    name.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ModelInfo;

    struct Two;

    impl Catalogue for Two {
        fn models(&self) -> Vec<ModelInfo> {
            vec![ModelInfo {
                name: "ember".into(),
                default: true,
                size: 256,
                sides: None,
                steps: 4,
                guidance: None,
                negative: false,
            }]
        }

        fn loras(&self) -> Vec<String> {
            vec!["ink".into()]
        }
    }

    fn refused(order: Order) -> Option<&'static str> {
        let order =
            Order { prompt: if order.prompt.is_empty() { "a fox".into() } else { order.prompt }, ..order };
        Limits::default().check(&order, &Two).err().map(|trouble| trouble.code)
    }

    #[test]
    fn numbers_outside_the_limits_are_refused() {
        assert_eq!(refused(Order::default()), None);
        let wrong = [
            Order { prompt: "   ".into(), ..Order::default() },
            Order { n: Some(0), ..Order::default() },
            Order { n: Some(11), ..Order::default() },
            Order { steps: Some(201), ..Order::default() },
            Order { width: Some(15), ..Order::default() },
            Order { width: Some(4096), height: Some(4096), ..Order::default() },
            Order { guidance: Some(f32::NAN), ..Order::default() },
            Order { strength: Some(0.5), ..Order::default() },
            Order { init: Some("a".into()), strength: Some(1.5), ..Order::default() },
            Order { init: Some("a".into()), mask_padding: Some(8), ..Order::default() },
            Order { references: vec!["a".into(); 11], ..Order::default() },
            Order {
                loras: vec![LoraOrder { name: "ink".into(), weight: f32::INFINITY }],
                ..Order::default()
            },
        ];
        for order in wrong {
            assert_eq!(refused(order.clone()), Some("invalid_value"), "{order:?}");
        }
        assert_eq!(refused(Order { prompt: "a".repeat(8001), ..Order::default() }), Some("prompt_too_long"));
    }

    #[test]
    fn names_that_are_not_in_the_list_are_refused_whatever_they_look_like() {
        for name in ["../ember", "/etc/passwd", "ember/", "EMBER", "", "ember\0", "C:\\ember"] {
            assert_eq!(
                refused(Order { model: Some(name.into()), ..Order::default() }),
                Some("model_not_found")
            );
            let loras = vec![LoraOrder { name: name.into(), weight: 1.0 }];
            assert_eq!(refused(Order { loras, ..Order::default() }), Some("lora_not_found"));
        }
        assert_eq!(refused(Order { model: Some("ember".into()), ..Order::default() }), None);
    }
}
