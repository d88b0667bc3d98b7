"""A corpus of 24 documents, with accents, Chinese, and a title that is markup."""

MARKUP = '<img src="x" onerror="window.broken = true">'
# topic, title, price, in stock, text
ROWS = [
    ("astronomy", "Spiral galaxies", 12, True, "Arms of stars and gas turn around a bright centre."),
    ("astronomy", "The Andromeda galaxy", 30, True, "Our nearest large galaxy, seen without a telescope."),
    ("astronomy", "Black holes", 25, False, "A star collapses and not even light leaves its centre."),
    ("astronomy", "Telescopes", 180, True, "A mirror gathers the light of distant stars and galaxies."),
    ("astronomy", "Comets", 15, True, "Ice and dust that grow a tail of gas near the sun."),
    ("astronomy", "Eclipses of the sun", 9, False, "The moon comes between the sun and us."),
    ("cooking", "Crème brûlée", 8, True, "Custard under burnt sugar, from the café around the corner."),
    ("cooking", "Tomato soup", 5, True, "Ripe tomatoes, basil and a little sugar, cooked slowly."),
    ("cooking", "Sourdough bread", 6, True, "Flour, water, salt and a starter that must rest overnight."),
    ("cooking", "Burnt sugar sauce", 7, False, "Sugar melts, darkens and is stopped with cream."),
    ("cooking", "Star anise", 4, True, "A spice in the form of a star, good in soups."),
    ("cooking", MARKUP, 1, True, "A title that is <b>markup</b> & stays text."),
    ("travel", "北京的天气", 60, True, "北京春天有风,夏天很热,秋天的天气最好。"),
    ("travel", "Night trains", 90, True, "Sleep while stars pass by the window of your cabin."),
    ("travel", "Cafés of Vienna", 20, True, "Coffee, cake and newspapers under high ceilings."),
    ("travel", "Dark sky parks", 40, False, "Far from cities the night is full of stars and galaxies."),
    ("travel", "Walking in the Alps", 75, True, "From hut to hut with bread and soup at night."),
    ("travel", "Sailing for beginners", 120, True, "Wind, water, and how to come to rest in a harbour."),
    ("gardens", "Tomatoes on a balcony", 11, True, "Sun, water and a stick to climb along."),
    ("gardens", "Night-scented flowers", 14, True, "They open after sunset, for moths under the stars."),
    ("gardens", "Sunflowers", 3, True, "Their heads turn to the sun until they bloom."),
    ("gardens", "Herbs in the shade", 10, False, "Mint and parsley need less sun than basil."),
    ("gardens", "A pond for frogs", 95, True, "Still water, stones and plants around its edge."),
    ("gardens", "Compost", 2, True, "Peel, leaves and time make good soil."),
]

NAMES = ("topic", "title", "price", "in_stock", "content")
DOCUMENTS = [{"doc_id": f"d/{at}", **dict(zip(NAMES, row, strict=True))} for at, row in enumerate(ROWS)]
