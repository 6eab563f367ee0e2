"""Operations: plain torch here is the specification that every faster backend must reproduce."""
