//! What subscribers and operators speak to.
